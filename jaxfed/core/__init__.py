"""The contract and what runs it."""
