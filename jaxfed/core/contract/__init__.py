"""The contract: algorithms, how their messages are reduced, and who takes part."""
