from bench.asynchronous.experiment.command import main

if __name__ == "__main__":
    main()
