"""One file per verb: parse, build the configuration, call the library, print."""
