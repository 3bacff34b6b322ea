"""Training libraries and loggers under everstep: each module needs the library that it is named after."""
