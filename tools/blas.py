"The BLAS to preload on Linux, where the wheels of MLX bring the reference one: prints its name, or nothing"
import ctypes,sys

names = ['libopenblasp.so.0', 'libopenblas.so.0', 'libmkl_rt.so.3', 'libmkl_rt.so.2', 'libmkl_rt.so'] # the first is Fedora's, with threads

def load_blas():
    "Name of the first BLAS that this process can load, and did: MLX uses it if it is imported later; '' if there is none"
    if not sys.platform.startswith('linux'): return ''
    for o in names:
        try: ctypes.CDLL(o, mode=ctypes.RTLD_GLOBAL)
        except OSError: continue
        return o
    return ''

if __name__ == '__main__': print(load_blas())
