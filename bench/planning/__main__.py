from bench.planning.command import main

if __name__ == "__main__":
    main()
