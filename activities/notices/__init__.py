"""Notices: events that people are notified of, the file of receivers, and the delivery by a program or over HTTPS."""
