"The public kernel functions on a machine without a GPU: a back end that runs every launch in the emulator."
import mlx.core as mx, numpy as np
from emulator import BFloat,run
from veloxquant_mlx.kernels.runtime import Backend

def to_numpy(a):
    if a.dtype==mx.bfloat16: return BFloat(np.array(a.view(mx.uint16)))
    return np.array(a)

def to_mlx(x, dtype): return mx.array(x).astype(dtype)

def dtype_name(dtype): return str(dtype).removeprefix('mlx.core.')

def emulated(layout='cuda', # or 'metal': which lane holds what of a matrix
    order='forward' # of the threads
):
    "A back end for `use_backend`"
    def launch(kernel, inputs, output_shapes, output_dtypes, grid, threadgroup):
        out = run(kernel.header, kernel.body, dict(zip(kernel.inputs, map(to_numpy, inputs))),
            {k: (tuple(s), dtype_name(t)) for k,s,t in zip(kernel.outputs, output_shapes, output_dtypes)}, grid, threadgroup, layout, order, shuffles_order_memory=False)
        return [to_mlx(out[k], t) for k,t in zip(kernel.outputs, output_dtypes)]
    return Backend(f'emulator ({layout})', launch, layout=='cuda')
