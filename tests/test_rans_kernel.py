"The decoder of stored codes in the emulator against NumPy's."
import mlx.core as mx, numpy as np, pytest
from emulated import emulated
from veloxquant_mlx.kernels.runtime import use_backend
from veloxquant_mlx.methods.cachegen import AnchorCodec, DirectCodec, decode_on_gpu
from veloxquant_mlx.ops.entropy import CorruptBlobError, decode_segments, encode_segments, rans_tables

@pytest.fixture(params=[('forward', 'cuda'), (1, 'metal')], autouse=True)
def emulator(request):
    "In two orders of the threads"
    order, layout = request.param
    with use_backend(emulated(order=order, layout=layout)): yield

def stored(D, n, bits, per_channel, U=2, seed=0):
    "Arguments of `decode_segments`: symbols of a narrow law in the first head, even ones in the last"
    rng, A = np.random.default_rng(seed), 2**bits-1
    s = np.clip(np.rint(A/9*rng.normal(size=(U, n, D)))+A//2, 0, A-1).astype(np.uint8)
    s[-1] = rng.integers(0, A, (n, D))
    counts = (s[..., None]==np.arange(A)).sum(axis=1)
    tables = rans_tables(counts if per_channel else counts.sum(axis=1, keepdims=True))
    W, borders = -(-D*bits//32), sorted({*range(0, n, 256), n})
    packed = np.random.default_rng(seed+1).integers(0, 2**32, (U, n, W), dtype=np.uint32)
    return encode_segments(s, tables, packed, borders), tables, n, D, W, borders

@pytest.mark.parametrize('D,n,bits,per_channel', [(64, 1, 4, True), (64, 257, 4, False), (80, 255, 3, True), (128, 256, 4, True), (128, 257, 8, True), (20, 513, 5, False)])
def test_the_same_symbols(D, n, bits, per_channel):
    args = stored(D, n, bits, per_channel)
    got, want = decode_on_gpu(*args), decode_segments(*args)
    for a,b in zip(got, want, strict=True): np.testing.assert_array_equal(a, b)
    if n>100: assert not want[2].all()

def test_no_segment_is_coded():
    args = stored(64, 20, 4, True, U=1)
    assert decode_segments(*args)[2].all()
    for a,b in zip(decode_on_gpu(*args), decode_segments(*args), strict=True): np.testing.assert_array_equal(a, b)

def test_damage_is_found():
    data, *rest = stored(64, 257, 4, True)
    assert data[0]==1
    broken = lambda i, bit: data[:i]+bytes([data[i]^1<<bit])+data[i+1:]
    for wrong in (broken(1, 0), broken(70, 3), broken(300, 7), data[:-1], data+b'\0', b'\7'+data[1:], b''):
        with pytest.raises(CorruptBlobError): decode_on_gpu(wrong, *rest)

@pytest.mark.parametrize('codec', [AnchorCodec(4, 32, 64), DirectCodec(3, 32, 64, per_channel=False)], ids=['anchors', 'direct'])
def test_a_codec_reads_its_stored_form(codec):
    x = mx.array(np.random.default_rng(0).standard_normal((2, 2, 320, 64)).cumsum(axis=2).astype(np.float32)/9)
    words = codec.encode(x, 0)[1]
    mode, data = codec.to_stored('codes', words)
    assert mode==1 and mx.array_equal(codec.from_stored('codes', data, words.shape), words)
