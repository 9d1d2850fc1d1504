"""Version of the package, apart from the names that the package offers."""

__version__ = "0.1.1"
