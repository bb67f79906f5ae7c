"Encode, decode and gather kernels in the emulator against the array operations."
import mlx.core as mx, numpy as np, pytest
from emulated import emulated
from veloxquant_mlx.kernels.encode import group_pack, level_book, level_pack, rotate_pack, row_unpack
from veloxquant_mlx.kernels.gather import gather_rows
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.methods.turboquant_rvq import SPLITS, RVQCodec, plane_table
from veloxquant_mlx.methods.vecinfer import MOST_KEPT, vq_encode
from veloxquant_mlx.ops.affine import dequantize_per_channel, dequantize_per_token, quantize_per_channel, quantize_per_token
from veloxquant_mlx.ops.codebook import nearest_level
from veloxquant_mlx.ops.kmeans import nearest_row
from veloxquant_mlx.ops.packing import pack_codes, unpack_codes
from veloxquant_mlx.ops.rotation import rotation

@pytest.fixture(params=[('forward', 'cuda'), (1, 'metal')], autouse=True)
def emulator(request):
    "In two orders of the threads and two layouts of the matrix tiles"
    order, layout = request.param
    with use_backend(emulated(order=order, layout=layout)): yield

@pytest.fixture
def rng(request): return np.random.default_rng(list(request.node.originalname.encode()))

def rows(rng, shape, dtype=mx.float16, spread=1.):
    "Numbers of mixed size, with constant stretches and zeros"
    x = rng.standard_normal(shape)*spread*np.exp(rng.standard_normal((*shape[:-1], 1)))
    x[..., :shape[-1]//4] *= 8
    x[..., -1, :] = x[..., -1, :1]
    return mx.array(x.astype(np.float32)).astype(dtype)

def assert_same(got, want):
    for a,b in zip(got, want, strict=True):
        assert a.dtype==b.dtype and a.shape==b.shape
        np.testing.assert_array_equal(np.array(a), np.array(b))

dims = [(64, 32), (80, 32), (96, 64), (128, 32), (256, 128)]

@pytest.mark.parametrize('n_bits', range(1, 9))
def test_group_pack_widths(rng, n_bits):
    for (dim, g),n in zip([dims[n_bits%5], dims[(n_bits+2)%5]], [3, 1]):
        x = rows(rng, (2, n, 2, dim))
        assert_same(group_pack(x, n_bits, g), quantize_per_token(x, n_bits, g))
        x = rows(rng, (2, n, 32, dim))
        assert_same(group_pack(x, n_bits, 32, per='channel'), quantize_per_channel(x, n_bits, 32))

@pytest.mark.parametrize('dim,group_size,n_bits,dtype,masked', [
    (128, 32, 4, mx.bfloat16, False), (128, 64, 2, mx.float32, True), (80, 32, 3, mx.float16, True), (64, 16, 4, mx.float16, False),
    (64, 8, 5, mx.float16, True), (83, 32, 3, mx.float16, False), (83, 16, 2, mx.bfloat16, True), (256, 256, 4, mx.float16, False),
    (80, 40, 3, mx.float16, False), (81, 27, 5, mx.float32, True), (20, 4, 7, mx.float16, False), (48, 100, 2, mx.bfloat16, False)])
def test_group_pack_per_token(rng, dim, group_size, n_bits, dtype, masked):
    x = rows(rng, (1, 3, 5, dim), dtype)
    mask = mx.array(rng.random(x.shape)>.3)&(mx.arange(5)>0)[:, None] if masked else None
    assert_same(group_pack(x, n_bits, group_size, mask=mask), quantize_per_token(x, n_bits, group_size, mask))

@pytest.mark.parametrize('dim,group_size,n_bits,dtype,masked', [
    (128, 32, 4, mx.bfloat16, False), (64, 16, 2, mx.float32, True), (80, 32, 3, mx.float16, True), (96, 64, 2, mx.float16, False),
    (83, 8, 5, mx.float16, True), (64, 128, 2, mx.float16, False), (128, 40, 4, mx.float16, False), (128, 20, 6, mx.float16, False),
    (80, 27, 3, mx.float16, False), (40, 12, 1, mx.float32, True), (83, 64, 8, mx.bfloat16, False), (64, 128, 3, mx.float32, False)])
def test_group_pack_per_channel(rng, dim, group_size, n_bits, dtype, masked):
    x = rows(rng, (1, 3, 2*group_size, dim), dtype)
    mask = mx.array(rng.random(x.shape)>.3)&(mx.arange(dim)>0) if masked else None
    assert_same(group_pack(x, n_bits, group_size, per='channel', mask=mask), quantize_per_channel(x, n_bits, group_size, mask))

@pytest.mark.parametrize('per', ['token', 'channel'])
def test_group_pack_beyond_half(rng, per):
    "Ranges that half precision cannot hold are clamped as by the array operations, and ties fall alike"
    quantize = quantize_per_token if per=='token' else quantize_per_channel
    x = rows(rng, (1, 1, 32, 64), mx.float32)
    x[..., :3, :] *= 1e30
    x[..., 3:6, :] *= 1e-30
    for y in (x, mx.array(rng.integers(0, 16, (1, 1, 32, 64))/2, mx.float16), x.astype(mx.float16)*3e3):
        y = mx.clip(y, -3e38, 3e38) if y.dtype==mx.float32 else mx.clip(y, -65504, 65504)
        assert_same(group_pack(y, 3, 32, per=per), quantize(y, 3, 32))

def test_no_rows():
    x = mx.zeros((1, 2, 0, 64))
    assert [o.shape for o in group_pack(x, 4, 32)]==[(1, 2, 0, 8), (1, 2, 0, 2), (1, 2, 0, 2)]
    assert [o.shape for o in rotate_pack(x, level_book(np.arange(16)), (2, 2), 1)]==[(1, 2, 0, 4), (1, 2, 0, 4), (1, 2, 0, 1)]

@pytest.mark.parametrize('n_bits', range(1, 9))
def test_level_pack(rng, n_bits):
    dim,n = dims[n_bits%5][0],[1, 5][n_bits%2]
    levels = mx.array(np.sort(rng.standard_normal(2**n_bits)), mx.float32)
    x = rows(rng, (2, 3, n, dim))
    book = level_book(levels)
    assert_same(level_pack(x, book, n_bits), [pack_codes(nearest_level(x, levels), n_bits)])
    if n_bits in SPLITS and n_bits>1:
        (b1, b2), codes = SPLITS[n_bits], nearest_level(x, levels)
        assert_same(level_pack(x, book, (b1, b2)), [pack_codes(codes>>b2, b1), pack_codes(codes&(2**b2-1), b2)])

@pytest.mark.parametrize('dim,dtype', [(83, mx.float32), (64, mx.bfloat16)])
def test_level_pack_tables(rng, dim, dtype):
    "A list of levels for each batch row; numbers on midpoints"
    x = mx.array(rng.integers(-8, 8, (2, 3, 5, dim))/2, mx.float32).astype(dtype)
    levels = mx.array([[-2, -1, 1, 4], [-3, 0, 1, 2]], mx.float32)
    want = mx.stack([nearest_level(r.astype(mx.float32), l) for r,l in zip(x, levels)])
    assert_same(level_pack(x, level_book(levels), 2), [pack_codes(want, 2)])

@pytest.mark.parametrize('levels', [[5, 5, 5, 5], [1000, 1000.25, 1001, 1003], [-1e30, 0, 1e-30, 1e30], [0, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 100], np.arange(16)**3])
def test_level_pack_books(rng, levels):
    "Levels at any distances; numbers on midpoints, next to them, and far away"
    l = np.array(levels, np.float32)
    mid = (l[1:]+l[:-1])/2
    x = np.concatenate([mid, np.nextafter(mid, -np.inf), np.nextafter(mid, np.inf), l, [-3e38, 3e38, 0, -0.]]).astype(np.float32)
    x = mx.array(np.pad(x, (0, 128-len(x)), mode='wrap').reshape(1, 2, 64))
    n_bits = len(l).bit_length()-1
    assert_same(level_pack(x, level_book(l), n_bits), [pack_codes(nearest_level(x, mx.array(l)), n_bits)])

def unpack(arrays, codec):
    "Codes of both planes together"
    planes = [unpack_codes(o, b, codec.dim) for o,b in zip(arrays, codec.widths) if b]
    return np.array(planes[0]<<codec.widths[1]|planes[1] if codec.widths[1] else planes[0]).astype(int)

@pytest.mark.parametrize('n_bits,dim,dtype', [(1, 64, mx.float16), (2, 128, mx.float16), (3, 256, mx.bfloat16), (4, 128, mx.float32), (4, 80, mx.float16),
    (5, 96, mx.float16), (6, 64, mx.float32), (8, 128, mx.float16), (4, 32, mx.float16), (3, 83, mx.float16), (2, 16, mx.float16), (2, 512, mx.float16)])
def test_rotate_pack(rng, n_bits, dim, dtype):
    codec = RVQCodec(n_bits, dim, 5)
    x = rows(rng, (1, 3, 41, dim), dtype)
    x[0, 0, 1] = 0
    levels, widths = plane_table(n_bits, codec.law, 1)[:, 0], codec.widths if codec.widths[1] else n_bits
    book = level_book(levels)
    got, want = rotate_pack(x, book, widths, 5), codec.encode(x, 0)
    assert [(o.shape, o.dtype) for o in got]==[(o.shape, o.dtype) for o in want]
    # Codes are equal unless a coordinate lies between two levels but for float rounding. Both paths sum D terms of float32 in an order of their own, over
    # log2(D) stages that are each off by 2^-24 of numbers below 8. A constant row has many such coordinates: half its signs cancel, and 0 is a midpoint.
    a, b = (unpack(o, codec) for o in (got, want))
    y, l = (np.array(o.astype(mx.float32)).astype(np.float64) for o in (x, levels))
    y = y@np.array(rotation(dim, 5)).astype(np.float64).T
    y *= dim**.5/np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-30)
    midpoint = ((l[1:]+l[:-1])/2)[np.clip(np.minimum(a, b), 0, len(l)-2)]
    assert ((a==b) | (np.abs(a-b)==1) & (np.abs(y-midpoint)<np.log2(dim)*2**-21)).all()
    s, t = (np.array(o[-1]).astype(np.float64) for o in (got, want))
    assert (np.abs(s-t)<=2**-10*t).all()                        # its last bit
    alone = rotate_pack(x[:, 1:2, 7:8], book, widths, 5)
    assert_same(alone, [o[:, 1:2, 7:8] for o in got])

@pytest.mark.parametrize('n_bits', range(1, 9))
def test_row_unpack(rng, n_bits):
    dim,g = dims[n_bits%5]
    x = rows(rng, (2, 1, 32, dim), spread=30.)
    w, s, z = quantize_per_token(x[:, :, :3], n_bits, g)
    assert_same([row_unpack(w, n_bits, dim, s, z, group_size=g)], [dequantize_per_token(w, s, z, n_bits, g, dim).astype(mx.float16)])
    w, s, z = quantize_per_channel(x, n_bits, 32)
    assert_same([row_unpack(w, n_bits, dim, s, z, per='channel', group_size=32)], [dequantize_per_channel(w, s, z, n_bits, 32, dim).astype(mx.float16)])

@pytest.mark.parametrize('n_bits,dim,g', [(3, 83, 32), (5, 30, 7), (11, 64, None), (16, 5, None)])
def test_row_unpack_odd(rng, n_bits, dim, g):
    codes = mx.array(rng.integers(0, 2**n_bits, (2, 3, dim)), mx.uint32)
    assert_same([row_unpack(pack_codes(codes, n_bits), n_bits, dim)], [codes])
    if not g: return
    x = rows(rng, (1, 2, 3, dim))
    w, s, z = quantize_per_token(x, n_bits, g)
    assert_same([row_unpack(w, n_bits, dim, s, z, group_size=g)], [dequantize_per_token(w, s, z, n_bits, g, dim).astype(mx.float16)])

@pytest.mark.parametrize('dim,dtype', [(64, mx.float16), (80, mx.bfloat16), (83, mx.float16), (81, mx.bfloat16), (33, mx.float32), (128, mx.uint32), (7, mx.uint8)])
def test_gather_rows(rng, dim, dtype):
    x = mx.array(rng.integers(0, 100, (2, 3, 11, dim))).astype(dtype)
    indices = mx.array(rng.integers(-2, 13, (2, 3, 6)), mx.int32)
    want = mx.take_along_axis(x, mx.clip(indices, 0, 10)[..., None], axis=2)
    got = gather_rows(x, indices)
    assert got.dtype==dtype
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), np.array(want.astype(mx.float32)))
    assert gather_rows(x, indices[..., :0]).shape==(2, 3, 0, dim)

@pytest.mark.parametrize('n_bits,dim,books,n', [(1, 1, (1,1), 300), (3, 32, (2,3), 7), (5, 3, (1,3), 61), (8, 4, (2,1), 257), (9, 7, (1,1), 30), (10, MOST_KEPT, (1,3), 9), (11, 2, (2,3), 40)])
def test_nearest_codewords(rng, n_bits, dim, books, n):
    "Bit for bit, with codebooks of all, of a batch row, of a head; of equally near codewords the lower one; numbers of fp16's whole range"
    K = 2**n_bits
    book = rng.standard_normal((*books, K, dim))
    if K>2: book[..., K//2:K//2+2, :] = book[..., :2, :] # twins
    x = rng.standard_normal((2, 3, n, dim))
    x[..., :2, :] = book[0, 0, :2]
    x[..., -1, :] = 65504
    x, book = mx.array(x.astype(np.float32)), mx.array(book).astype(mx.float16)
    got = vq_encode(x, book)
    assert_same((got,), (nearest_row(x, book),))
    if K>2: assert not np.isin(np.array(got), (K//2, K//2+1)).any()
