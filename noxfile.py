"""Development tasks: `nox -s tests`, `nox -s lint`, `nox -s sanitize`, `nox -s bench -- collectives`."""

import nox

nox.options.sessions = ["lint", "tests"]


@nox.session
def tests(session: nox.Session) -> None:
    """The whole test suite, against the installed package."""
    session.install("-c", "constraints.txt", ".[demo,test]")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Everything that reads the sources without running them."""
    session.install("-c", "constraints.txt", ".[demo,test,dev]")
    session.run("bash", ".ci/lint", external=True)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Kernels and transport under AddressSanitizer and UndefinedBehaviorSanitizer."""
    session.install("-c", "constraints.txt", ".[test]")
    session.run("bash", ".ci/sanitize", *session.posargs, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """One bench by name: kernels, collectives, training or gpu."""
    session.install("-c", "constraints.txt", ".[bench]")
    name, *rest = session.posargs or ["kernels"]
    session.run("python", "-m", f"bench.{name}", *rest)
