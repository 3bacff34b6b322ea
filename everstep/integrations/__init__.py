"""Connects training libraries and loggers to everstep; each module needs the library after which it is named."""
