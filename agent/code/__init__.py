"""Snapshots of jobs' code on this machine: kept in a cache, run from there, tried before they are used."""
