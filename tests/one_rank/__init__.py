"""Public collective calls, each with wrong arguments that one rank gives alone."""
