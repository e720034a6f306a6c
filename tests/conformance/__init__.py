"""Other people's load generators, unmodified, against our server: `make conformance`."""
