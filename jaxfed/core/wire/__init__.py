"""The wire: channels between clients and server, compressors, memory, noise and masks."""
