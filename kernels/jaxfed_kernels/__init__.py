"""Hand-written accelerator kernels: arrays in, arrays out."""
