"The kernel of anchorkv in the emulator against array operations."
import mlx.core as mx
import numpy as np
import pytest
from emulated import emulated
from veloxquant_mlx.engine.hook import install
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.methods.anchorkv import AnchorKVCache
from veloxquant_mlx.ops.rope import RopeParams

@pytest.fixture(autouse=True)
def hook(): install() # other tests of the process may have taken it away

def draw(n, seed, B, n_rep, D, D_v, dtype=mx.float16):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in ((B,2*n_rep,n,D), (B,2,n,D), (B,2,n,D_v))]

def call(c, x, mask='made', sinks=None):
    q, k, v = x
    return mx.fast.scaled_dot_product_attention(q, *c.update_and_fetch(k, v), scale=q.shape[-1]**-.5, mask=c.make_mask(q.shape[2]) if isinstance(mask, str) else mask, sinks=sinks)

CASES = [ # D, D_v, query heads of a KV head, batch, layout, dtype, rope, fields
    (64, 64, 2, 1, 'cuda', mx.float16, RopeParams(64), dict(anchorkv_theta=.3)),
    (64, 128, 3, 2, 'metal', mx.float16, None, dict(anchorkv_theta=.4, anchorkv_residual_bits=3, anchorkv_window=13)),
    (128, 64, 5, 1, 'metal', mx.bfloat16, RopeParams(128, base=5e5, scale=.25), dict(anchorkv_theta=1., anchorkv_residual_bits=4)),
    (128, 128, 1, 1, 'cuda', mx.float32, RopeParams(128), dict(anchorkv_theta=.3, anchorkv_residual_bits=1, anchorkv_anchor_frac=.25)),
    (64, 64, 2, 1, 'metal', mx.float16, RopeParams(64), dict(anchorkv_theta=.01)),
    (256, 64, 1, 1, 'cuda', mx.float16, RopeParams(256), dict(anchorkv_theta=.3))]

@pytest.mark.parametrize('D,D_v,n_rep,B,layout,dtype,rope,fields', CASES, ids=[f'{c[0]}-{c[1]}-{c[4]}-{c[5]}' for c in CASES])
def test_same_outputs(D, D_v, n_rep, B, layout, dtype, rope, fields):
    "A prompt, steps and calls of a few tokens, with sinks, with a mask, and after a cut"
    fields, emulator = dict(anchorkv_window=16)|fields, emulated(layout)
    with use_backend(emulator): fused = AnchorKVCache.of(head_dim=D, fused_sdpa=True, **fields)
    plain = AnchorKVCache.of(head_dim=D, use_metal_kernels=False, **fields)
    for c in fused, plain: c.bind(0, D, rope, False, False, '')
    def both(n, seed, **kw):
        x = draw(n, seed, B, n_rep, D, D_v, dtype)
        with use_backend(emulator): got = call(fused, x, **kw); mx.eval(got, fused.state)
        want = call(plain, x, **kw)
        mx.eval(want, plain.state)
        assert got.dtype==want.dtype==dtype and mx.abs((got-want).astype(mx.float32)).max()<(2e-2 if dtype==mx.bfloat16 else 3e-3)*(1+mx.abs(want).max()), (n, seed)
        assert all(mx.array_equal(a, b) for a,b in zip(fused.payload(), plain.payload(), strict=True))
    both(200, 0)
    both(1, 1)
    assert fused.lengths==[201] and fused.no_kernel is None
    both(1, 2); both(3, 3); both(1, 4, sinks=mx.arange(2*n_rep).astype(mx.float32))
    both(1, 5, mask=mx.arange(207)[None]>20)
    assert fused.trim(fused.offset-150)==plain.trim(plain.offset-150)
    both(1, 6)

def test_the_kernel_runs(monkeypatch):
    "Not the array operations, where they give the same"
    with use_backend(emulated()):
        c = AnchorKVCache.of(head_dim=64, anchorkv_window=16, use_metal_kernels=True)
        for i,n in enumerate((100,1)): mx.eval(call(c, draw(n, i, 1, 2, 64, 64)), c.state)
        monkeypatch.setattr(AnchorKVCache, 'rows', None)
        mx.eval(c.fused(draw(1, 2, 1, 2, 64, 64)[0], .1, None))
        assert c.details().endswith('kernels')

def test_what_has_no_kernel():
    with use_backend(emulated()):
        for D,rope,reason in (80, None, 'head dimension 80 is not 64, 128 or 256'), (64, RopeParams(32), 'RoPE turns other pairs'), (64, RopeParams(64, traditional=True), 'RoPE turns other pairs'):
            c = AnchorKVCache.of(head_dim=D)
            c.bind(0, D, rope, False, False, '')
            assert reason in c.details() and reason in c.no_kernel
        with pytest.raises(RuntimeError, match='use_metal_kernels=True.*head dimension 80'): AnchorKVCache.of(head_dim=80, use_metal_kernels=True)
