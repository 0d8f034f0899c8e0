from bench.tensor_parallel.command import main

if __name__ == "__main__":
    main()
