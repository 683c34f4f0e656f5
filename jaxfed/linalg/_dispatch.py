def inverse_sqrt_kernel(gram):
    raise NotImplementedError
