"The kernel emulator: what it computes, against numpy, and that it finds the mistakes it is there to find."
import numpy as np
import pytest
import emulator
from emulator import *

F32,F16,U32 = np.float32,np.float16,np.uint32
LAYOUTS,ORDERS = ('cuda','metal'),('forward','reverse',1)
layouts,orders = pytest.mark.parametrize('layout', LAYOUTS),pytest.mark.parametrize('order', ORDERS)
rng = np.random.default_rng

def groups(n, size): return -(-n//size)*size # threads of a grid with a thread for each of n elements

def run1(body, out, n=32, header='', threadgroup=None, order='forward', layout='cuda', strict=False, **inputs):
    "The one output of a kernel with a threadgroup of n threads"
    return run(header, body, inputs, dict(out=out), (n,1,1), (threadgroup or n,1,1), layout, order, not strict)['out']

LANE = 'const uint lane = thread_index_in_simdgroup, i = threadgroup_position_in_grid.x*64 + thread_position_in_threadgroup.x;\n'

# --- arrays and positions

@orders
def test_saxpy_of_odd_length(order):
    n = 133
    x,y = rng(0).standard_normal((2,n)).astype(F32)
    out = run1(LANE+'if (i < size[0]) out[i] = a[0]*x[i] + y[i];', ((n,), F32), groups(n,64), threadgroup=64, order=order,
        x=x, y=y, a=np.array([2.5], F32), size=np.array([n], U32))
    assert (out==F32(2.5)*x+y).all()

def test_positions():
    body = '''const uint3 g = threadgroup_position_in_grid, t = thread_position_in_threadgroup;
    const uint x = g.x*8 + t.x, y = g.y*4 + t.y, z = g.z*2 + t.z;
    out[(z*8 + y)*16 + x] = x | y<<8 | z<<16 | thread_index_in_simdgroup<<20 | simdgroup_index_in_threadgroup<<28;'''
    out = run('', body, {}, dict(out=((4,8,16), U32)), (16,8,4), (8,4,2))['out']
    z,y,x = np.indices((4,8,16))
    assert (out==(x | y<<8 | z<<16 | (y%4*8 + x%8)<<20 | (z%2)<<28)).all()

@pytest.mark.parametrize('dtype', [np.float32, np.float16, np.int32, np.uint32, np.uint16, np.uint8])
def test_dtypes(dtype):
    x = rng(0).integers(0, 100, (4,8)).astype(dtype)
    assert (run1('out[thread_index_in_simdgroup] = x[thread_index_in_simdgroup];', ((4,8), dtype), x=x.T)==x.T.reshape(4,8)).all()

def test_bfloat():
    x = np.concatenate([rng(0).standard_normal(29), [np.inf, -0., 1+2**-8]]).astype(F32)
    b = BFloat.rounded(x)
    assert np.abs(b.floats()[:29]/x[:29]-1).max()<=2**-8 and b.floats()[31]==1 # the tie goes to even
    assert (run1('out[thread_index_in_simdgroup] = (float)x[thread_index_in_simdgroup];', ((32,), F32), x=b)==b.floats()).all()
    assert (run1('out[thread_index_in_simdgroup] = bf16(x[thread_index_in_simdgroup]);', ((32,), 'bfloat16'), x=x)==b.floats()).all()

def test_functions_take_any_pointer():
    header = '''template<class P> FN float total(P values, int n) { float s = 0; UNROLL for (int i=0; i<n; ++i) s += values[i]; return s; }
    FN void twice(thread float (&c)[2]) { c[0] *= 2; c[1] *= 2; }'''
    body = '''threadgroup float rows[2][32];
    const uint lane = thread_index_in_simdgroup;
    rows[0][lane] = x[lane]; rows[1][lane] = 2*x[lane];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float c[2] = {total(x + 4, 28), total(rows[1], 32)};
    twice(c);
    out[lane] = c[0] + c[1] + total(&rows[0][31], 2);'''
    assert (run1(body, ((32,), F32), header=header, x=np.ones(32, F32))==56+128+3).all()

# --- simdgroup operations and barriers

@orders
def test_reductions(order):
    x = rng(0).standard_normal(64).astype(F32)
    body = LANE + 'out[i*4] = simd_sum(x[i]); out[i*4+1] = simd_max(x[i]); out[i*4+2] = simd_min(x[i]); out[i*4+3] = simd_any(i==40);'
    out = run1(body, ((64,4), F32), 64, order=order, x=x)
    for s in (0,32):
        y = x[s:s+32]
        assert np.allclose(out[s:s+32], [y.sum(), y.max(), y.min(), s==32], atol=1e-5)
        assert (out[s:s+32]==out[s]).all()

@orders
def test_shuffles(order):
    x = rng(0).standard_normal(32).astype(F32)
    body = '''const uint lane = thread_index_in_simdgroup;
    out[lane*3] = simd_shuffle_xor(x[lane], 5); out[lane*3+1] = simd_shuffle(x[lane], (lane*7+3)&31); out[lane*3+2] = simd_shuffle((half)x[lane], 31);'''
    out,k = run1(body, ((32,3), F32), order=order, x=x),np.arange(32)
    assert (out==np.stack([x[k^5], x[(k*7+3)%32], np.full(32, x[31]).astype(F16)], 1)).all()

TREE = '''threadgroup float sums[128];
const int k = thread_position_in_threadgroup.x;
sums[k] = x[threadgroup_position_in_grid.x*128 + k];
for (int m=64; m; m>>=1) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (k<m) sums[k] += sums[k+m];
}
if (k==0) out[threadgroup_position_in_grid.x] = sums[0];'''

@orders
def test_threadgroup_reduction(order):
    x = rng(0).integers(-50, 50, 512).astype(F32)
    assert (run1(TREE, ((4,), F32), 512, threadgroup=128, order=order, x=x)==x.reshape(4,128).sum(1)).all()

def test_several_declarations_at_once():
    body = '''const int SIZE = 16; threadgroup uint a[SIZE*2], b[2][SIZE]; threadgroup uint one[1];
    const uint lane = thread_index_in_simdgroup;
    a[lane] = lane; b[lane>>4][lane&15] = lane; if (lane==9) one[0] = 100;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[lane] = a[31-lane] + b[1-(lane>>4)][lane&15] + one[0];'''
    k = np.arange(32)
    assert (run1(body, ((32,), U32))==131-k+(k^16)).all()

def test_elements_in_expressions():
    "What is read from an array that can be written behaves as its element type; bf16 as float"
    body = """threadgroup half h[32]; threadgroup uint u[2][32]; threadgroup bf16 b[32];
    const uint lane = thread_index_in_simdgroup;
    h[lane] = x[lane]; u[0][lane] = u[1][lane] = lane; b[lane] = x[lane]; b[lane] += 1.f;
    h[lane] *= h[lane]; u[0][lane] <<= 1; u[0][lane] |= u[1][lane] & 1;
    const half a = h[lane]; float c = h[lane]*2.f + (float)h[lane] + max((float)h[lane], (float)x[lane]) + (lane<16 ? h[lane] : h[lane]) - (half)h[lane];
    c += (h[lane]<h[lane] || h[lane]!=h[lane] || 2.f*h[lane]<0.f || -h[lane]>h[lane] || u[1][lane]%2u!=(lane&1) || !(u[0][lane]==u[0][lane])) ? 99.f : 0.f;
    if (h[lane]) c += u[0][lane]<2u*lane;
    out[lane*3] = c; out[lane*3+1] = h[u[0][lane]>>1]*a + b[lane]; out[lane*3+2] = simd_sum((float)u[0][lane]) + simd_max((float)h[lane]);"""
    x = np.arange(32).astype(F16)/8
    h,k = x*x,np.arange(32)
    assert (run1(body, ((32,3), F32), x=x)==np.stack([h*F32(3)+np.maximum(h, x), (h*h).astype(F32)+(x+1), np.full(32, (2*k|k&1).sum() + h.max())], 1)).all()

# --- halves

def halves(n, seed): # of all magnitudes, with the special ones
    x = rng(seed).integers(0, 1<<16, n).astype(np.uint16).view(F16)
    x[:8] = 0, -0., 65504, 2**-24, np.inf, -np.inf, 1, 2**-14
    return rng(seed+100).permutation(x)

def pairs(x): return x.view(U32)

def same(a, b): return ((a==b) | np.isnan(a) & np.isnan(b)).all()

@pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid')
def test_half_arithmetic_rounds_once():
    n = 1<<15
    a,b,c = (halves(n, s) for s in (1,2,3))
    c[::2] = (-a.astype(float)*b)[::2] # cancels all but the rounding error of the product
    body = LANE + '''out[i*3] = fma2(a[i], b[i], c[i]); out[i*3+1] = add2(a[i], b[i]); out[i*3+2] = mul2(a[i], b[i]);'''
    out = run1(body, ((n//2,3), U32), n//2, threadgroup=64, a=pairs(a), b=pairs(b), c=pairs(c)).view(F16).reshape(-1,3,2)
    x,y,z = (np.longdouble(o).reshape(-1,2) for o in (a,b,c))
    for i,want in enumerate((x*y+z, x+y, x*y)): assert same(out[:,i], want.astype(float).astype(F16))

def test_fma2_next_to_a_tie():
    "1 + 2^-10 + 2^-11 (1 - 2^-20): rounded to float first, it would be a tie and go up"
    a,b,c = (np.full(2, v, F16).view(U32) for v in ((1+2**-10)/32, (1-2**-10)/64, 1+2**-10))
    assert (run1('out[0] = fma2(a[0], b[0], c[0]);', ((1,), U32), 1, a=a, b=b, c=c)==c).all()

@pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid')
def test_half_expressions_round_after_each_operation():
    a,b,c = (halves(64, s) for s in (1,2,3))
    assert same(run1(LANE+'out[i] = a[i]*b[i] + c[i];', ((64,), F16), 64, a=a, b=b, c=c), a*b+c)

@pytest.mark.filterwarnings('ignore:overflow')
def test_packing():
    ties = np.concatenate([np.arange(2048, 2112)/2048+1/4096, np.arange(64)*2.**-24+2.**-25, [65519, 65520, 65536, -1e-9, -2e-8, 3e-8, np.inf, np.nan]])
    x = np.concatenate([ties, rng(0).standard_normal(64-8)*10.**rng(1).integers(-9, 6, 56)]).astype(F32)
    out = run1(LANE + '''const uint h = pack2(x[2*i], x[2*i+1]);
    out[4*i] = h; out[4*i+1] = low_halves(bits((half)low2(h)), bits((half)low2(h))); out[4*i+2] = bits((half)x[2*i+1]); out[4*i+3] = pack2(high2(h), low2(h));''',
        ((len(x)//2,4), U32), len(x)//2, threadgroup=len(x)//2, x=x)
    want = x.astype(F16)
    assert same(out[:,0].copy().view(F16), want) and same(out[:,3].copy().view(F16).reshape(-1,2)[:,::-1], want.reshape(-1,2))
    assert same(out[:,1].copy().view(F16), np.repeat(want[::2], 2)) and same(out[:,2].astype(np.uint16).view(F16), want[1::2])

def test_bits_and_vector_loads():
    w = rng(0).integers(0, 1<<32, 128, dtype=U32)
    header = 'template<class P> FN uint4 fetch(P p, int i) { return load4(p, i); }'
    body = '''const uint i = thread_index_in_simdgroup;
    const uint4 v = fetch(w, 4*i); const uint2 u = load2(w + 2, 2*i);
    out[i*6] = low_halves(v.x, v.y); out[i*6+1] = high_halves(v.z, v.w); out[i*6+2] = funnel(v.x, v.y, i); out[i*6+3] = u.x; out[i*6+4] = u.y;
    out[i*6+5] = and_or(load_half2(h, 2*i), 0xffff, 5u<<16);'''
    out = run1(body, ((32,6), U32), header=header, w=w, h=w.view(F16))
    v,k = w.reshape(32,4).astype(np.uint64),np.arange(32, dtype=np.uint64)
    wide = v[:,0] | v[:,1]<<np.uint64(32)
    assert (out.T==[v[:,0]&0xffff | (v[:,1]&0xffff)<<16, v[:,2]>>16 | v[:,3]>>16<<16, wide>>k & 0xffffffff, w[2:66:2], w[3:67:2], w[:32]&0xffff | 5<<16]).all()

def test_words_that_spare_instructions():
    "`hold`, and shared memory by bytes"
    w = rng(0).integers(0, 1<<16, 128, dtype=np.uint16)
    body = '''uint i = thread_index_in_simdgroup; hold(i);
    threadgroup uint table[2*TABLE_COPIES + 32]; threadgroup half cells[256];
    if (i==0) { for (int k=0; k<2*TABLE_COPIES + 32; ++k) table[k] = 3*k; }
    for (int k=0; k<4; ++k) poke(cells, poke_base(cells, 8*i) + 4*k + 2, bits(w[4*i+k])); // odd cells
    for (int k=0; k<4; ++k) cells[8*i+2*k] = as_half(neg2(bits(w[4*i+k])));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[i*5] = peek(table, peek_base(table, i) + 4*(i & 1));
    const uint4 v = load_half8(cells, 8*(31-i)); out[i*5+1] = v.x; out[i*5+2] = v.y; out[i*5+3] = v.z; out[i*5+4] = v.w;'''
    for layout in ('cuda', 'metal'):
        out = run1(body, ((32,5), U32), layout=layout, w=w.view(F16))
        i = np.arange(32, dtype=U32)
        assert (out[:,0]==3*(i+(i&1))).all() and (out[::-1,1:]==(w.astype(U32)<<16 | w^0x8000).reshape(32,4)).all()

def test_math():
    x = np.abs(rng(0).standard_normal(32)).astype(F32)*20
    body = '''const int i = thread_index_in_simdgroup; const float v = x[i];
    out[i*8] = i&1 ? exp2(v) : fast_exp2(v); out[i*8+1] = log2(v); out[i*8+2] = rint(v); out[i*8+3] = floor(v); out[i*8+4] = ceil(-v); out[i*8+5] = fma(v, v, -v*v);
    out[i*8+6] = sqrt(v); out[i*8+7] = min(fabs(v), max(v, -1.f));'''
    out = run1(body, ((32,8), F32), x=x)
    exact = x.astype(float)**2
    assert np.allclose(out.T, [np.exp2(x), np.log2(x), np.rint(x), np.floor(x), np.ceil(-x), exact-(x*x), np.sqrt(x), x], rtol=1e-6)

# --- matrix tiles

TILE = '''const uint lane = thread_index_in_simdgroup; const int g = frag_row(lane), t = 2*frag_col(lane);
'''

@layouts
@orders
def test_mma(layout, order):
    a,b,c = (rng(i).standard_normal(s) for i,s in enumerate([(16,16),(16,8),(16,8)]))
    body = TILE + '''float d[4] = {c[g*8+t], c[g*8+t+1], c[g*8+64+t], c[g*8+64+t+1]};
    uint f[2]; for (int i=0; i<2; ++i) f[i] = bits(b[(b_k(lane,0)+8*i)*8+b_n(lane,0)]) | bits(b[(b_k(lane,1)+8*i)*8+b_n(lane,1)])<<16;
    for (int i=0; i<2; ++i) mma(d, load_half2(a, g*16+t), load_half2(a, g*16+128+t), load_half2(a, g*16+t+8), load_half2(a, g*16+128+t+8), f[0], f[1]);
    out[g*8+t] = d[0]; out[g*8+t+1] = d[1]; out[g*8+64+t] = d[2]; out[g*8+64+t+1] = d[3];'''
    a,b,c = a.astype(F16),b.astype(F16),c.astype(F32)
    assert np.allclose(run1(body, ((16,8), F32), layout=layout, order=order, a=a, b=b, c=c), c+2*a.astype(F32)@b.astype(F32), atol=1e-5)

@layouts
def test_b_from_c(layout):
    "(A B) used as the next B, both of its 8 rows halves"
    a,b = rng(0).standard_normal((16,16)).astype(F16),rng(1).standard_normal((16,8)).astype(F16)
    body = TILE + '''const uint x = b_from_c(load_half2(b, g*8+t)), y = b_from_c(load_half2(b, (g+8)*8+t));
    float d[4] = {};
    mma(d, load_half2(a, g*16+t), load_half2(a, g*16+128+t), load_half2(a, g*16+t+8), load_half2(a, g*16+128+t+8), x, y);
    out[g*8+t] = d[0]; out[g*8+t+1] = d[1]; out[g*8+64+t] = d[2]; out[g*8+64+t+1] = d[3];'''
    assert np.allclose(run1(body, ((16,8), F32), layout=layout, a=a, b=b), a.astype(F32)@b.astype(F32), atol=1e-5)

@layouts
def test_lanes_of_a_tile(layout):
    body = '''const uint l = thread_index_in_simdgroup; const uint rows[3] = {ROW_XOR_0, ROW_XOR_1, ROW_XOR_2}, cols[2] = {COL_XOR_0, COL_XOR_1};
    out[l*7] = frag_row(l); out[l*7+1] = frag_col(l);
    for (int i=0; i<3; ++i) out[l*7+2+i] = frag_col(l^rows[i])*8 + frag_row(l^rows[i]);
    for (int i=0; i<2; ++i) out[l*7+5+i] = frag_col(l^cols[i])*8 + frag_row(l^cols[i]);'''
    row,col,*others = run1(body, ((32,7), U32), layout=layout).T
    assert sorted(zip(row, col))==[(g,t) for g in range(8) for t in range(4)]
    for o in others[:3]: assert (o//8==col).all() and (o%8!=row).all()
    for o in others[3:]: assert (o//8!=col).all() and (o%8==row).all()
    assert {int(o[0]%8)^int(row[0]) for o in others[:3]}=={1,2,4} and {int(o[0]//8)^int(col[0]) for o in others[3:]}=={1,2}

# --- tests of the test: each mistake is found, whatever the order of the threads

def fails(error, match, body, out=((32,), F32), **kw):
    for order in ORDERS:
        with pytest.raises(error, match=match): run1(body, out, order=order, **kw)

X = np.ones(32, F32)
COPY = 'const uint lane = thread_index_in_simdgroup; '

def test_read_past_the_end(): fails(OutOfBounds, r'read of x\[32\], which has 32 elements', COPY+'out[lane] = x[lane+1];', x=X)
def test_read_before_the_start(): fails(OutOfBounds, r'read of x\[-1\]', COPY+'auto p = x + 3; out[lane] = p[(int)lane - 4];', x=X)
def test_write_with_a_wrong_stride(): fails(OutOfBounds, r'write of out\[\d+\]', COPY+'out[lane*2] = x[lane];', x=X)
def test_vector_load_past_the_end():
    fails(OutOfBounds, r'read of w\[30\], which has 30', COPY+'const uint4 v = load4(w, lane&28); out[lane] = v.x;', w=np.ones(30, U32))
def test_unaligned_load(): fails(BadArgument, r'load2 at w\[\d+\]: not a multiple of 2', COPY+'out[lane] = load2(w, lane&30|1).x;', w=np.ones(34, U32))
def test_lane_that_does_not_exist(): fails(BadArgument, 'simd_shuffle .*lane or mask 3[2-5]', COPY+'out[lane] = simd_shuffle(x[lane], lane+4);', x=X)
def test_threadgroup_memory_past_the_end():
    fails(OutOfBounds, r'write of m\[32\]', COPY+'threadgroup float m[32]; m[lane+1] = 0; out[lane] = 0;')
def test_threadgroup_memory_past_its_row():
    fails(OutOfBounds, 'index 16 into a row of 16 elements of m', COPY+'threadgroup float m[4][16]; m[lane>>4][(lane&15)+1] = 0; out[lane] = 0;')

def test_unwritten_output():
    fails(UnwrittenOutput, r'2 of 32 elements of out were never written, the first is out\[1, 14\]', COPY+'if (lane<30) out[lane] = 0;', ((2,16), F32))
def test_read_of_an_unwritten_output(): fails(UninitialisedRead, r'read of out\[\d+\]', COPY+'out[lane] += 1;')
def test_read_of_unwritten_threadgroup_memory():
    body = COPY+'''threadgroup float m[33]; m[lane] = x[lane];
    threadgroup_barrier(mem_flags::mem_threadgroup); out[lane] = m[lane+1];'''
    fails(UninitialisedRead, r'read of m\[32\], which nobody has written', body, x=X)
def test_threadgroup_memory_does_not_outlive_its_threadgroup():
    body = '''threadgroup float m[32]; const uint i = thread_index_in_simdgroup, g = threadgroup_position_in_grid.x;
    if (g==0) m[i] = 1; out[g*32+i] = m[i];'''
    fails(UninitialisedRead, r'read of m\[\d+\].*of threadgroup 1,0,0', body, ((64,), F32), n=64, threadgroup=32)

TG,SG = (f'{o}_barrier(mem_flags::mem_threadgroup);' for o in ('threadgroup','simdgroup'))

def exchange(sync, mask, tail=''):
    "Each of 64 threads reads what another one wrote"
    return f"""threadgroup float m[64]; const uint i = thread_position_in_threadgroup.x;
    m[i] = x[i]; {sync} const float v = m[i^{mask}]; {tail} out[i] = v;"""
WIDE = dict(out=((64,), F32), n=64, x=np.arange(64, dtype=F32))

SHARED_SUM = """const uint lane = thread_index_in_simdgroup; const int g = threadgroup_position_in_grid.x;
    out[8 + 32*g + lane] = x[lane] + g;
    if (CONDITION) { float v = 0.f; for (int i=0; i<3; ++i) v += out[8 + 32*i + lane]; v = simd_sum(v); if (lane < 8) out[lane] = v; }"""
def test_last_one():
    "One threadgroup of three comes last and may read what the others wrote; no other may"
    x = np.arange(32, dtype=F32)
    out = run1(SHARED_SUM.replace('CONDITION', 'last_one(out, g, 3, 1, 2)'), ((104,), F32), n=96, threadgroup=32, x=x)
    assert (out[:8]==3*x.sum()+32*3).all()
    fails(DataRace, r'read of out\[\d+\], which thread \d+ of another threadgroup wrote', SHARED_SUM.replace('CONDITION', 'g == 2'), ((104,), F32), n=96, threadgroup=32, x=x)

def test_missing_barrier():
    "A reader that runs before the writer finds the same error as one that runs after it"
    for sync,mask in [('', 1), ('', 32), (SG, 32), ('simd_sum(1.f);', 32)]: fails(DataRace, r'm\[\d+\].*no barrier between', exchange(sync, mask), **WIDE)
    fails(DataRace, r'sums\[\d+\].*no barrier between', TREE.replace('threadgroup_barrier', '(void)'), ((1,), F32), n=128, x=np.ones(128, F32))
    fails(DataRace, r'sums\[\d+\].*no barrier between', TREE.replace('threadgroup_barrier', 'simdgroup_barrier'), ((1,), F32), n=128, x=np.ones(128, F32))

def test_missing_barrier_before_a_write():
    for sync,mask in [('', 1), ('', 32), (SG, 32)]:
        fails(DataRace, r'(read|write) of m\[\d+\].*no barrier between', exchange(TG, mask, sync+' m[i] = -1;'), **WIDE)
    fails(DataRace, r'write of m\[0\].*no barrier between', exchange(TG, 0, 'm[0] = i;'), **WIDE)

@orders
def test_enough_barriers(order):
    for sync,mask in [(SG, 1), (TG, 1), (TG, 32), ('simd_sum(1.f);', 1)]:
        out = run1(exchange(sync, mask, sync+' m[i] = -1;'), order=order, **WIDE)
        assert (out==np.arange(64)^mask).all()

def test_shuffles_need_not_order_memory(): fails(DataRace, r'm\[\d+\]', exchange('simd_sum(1.f);', 1), strict=True, **WIDE)

def test_two_threads_may_write_one_value():
    assert (run1(COPY+'threadgroup uint m[1]; m[0] = 7; '+TG+' out[lane&15] = m[0];', ((16,), U32))==7).all()
    fails(DataRace, r'write of out\[\d+\], which thread \d+ wrote too', COPY+'out[lane&15] = lane;', ((16,), U32))
    fails(DataRace, r'write of out\[\d+\], which thread \d+ of another threadgroup wrote too',
        'out[thread_index_in_simdgroup] = threadgroup_position_in_grid.x;', ((32,), U32), n=64, threadgroup=32)

def test_divergent_barrier():
    body = 'const uint i = thread_position_in_threadgroup.x; '
    wide = dict(out=((64,), F32), n=64)
    finished,waits = r'thread \d+ has finished',r'thread \d+ waits at threadgroup_barrier \(body, line 1\)'
    for cond in 'i<40','i<32','i==0','i!=5':
        with_return = body + f'if (!({cond})) return; '
        fails(DivergentBarrier, f'{waits}, but {finished}|{finished}, but {waits}', body+f'if ({cond}) {TG} out[i] = 0;', **wide)
        fails(DivergentBarrier, f'{waits}, but {finished}|{finished}, but {waits}', with_return+TG, **wide)
        fails(DivergentBarrier, f'{waits}, but {waits}', body+f'if ({cond}) {TG} else {TG} out[i] = 0;', **wide)

def test_divergent_simdgroup_operation():
    body = 'const uint i = thread_position_in_threadgroup.x; float s = 0;\n'
    for bad in ('if (i<16) s = simd_sum(1.f);', 'if (i<16) s = simd_sum(1.f); else s = simd_max(1.f);', 'if (i&1) s = simd_sum(1.f); else s = simd_sum(1.f);',
        f'if (i&1) s = simd_sum(1.f); else {TG}', f'if (i!=7) {SG}', 'if (i==3) return; s = b_from_c(i);'):
        fails(DivergentBarrier, r'body, line 2', body+bad+' out[i] = s;', ((64,), F32), n=64)
    out = run1(body+'if (i<32) s = simd_sum(1.f); out[i] = s;', ((64,), F32), 64) # simdgroups may differ
    assert (out==np.repeat([32,0], 32)).all()
    fails(DivergentBarrier, 'in a simdgroup of 16 threads', body+'out[i] = simd_sum(1.f);', ((48,), F32), n=48)

def test_text_outside_the_dialect():
    "Unknown names, positions in functions, and mixed types, where the GPUs' compilers differ"
    for bad in ('out[0] = expf(1.f);', 'out[0] = min(1.f, 1);', 'threadgroup half* p;', 'threadgroup half h;', 'out[0] = simd_sum(1);', 'out[0] = twice();', 'auto v = out[0]; out[1] = v;',
        'threadgroup_barrier(mem_flags::mem_none);'):
        with pytest.raises(CompileError, match='body:1|header:1'):
            run1(bad, ((1,), F32), header='FN uint twice() { return 2*thread_index_in_simdgroup; }' if 'twice' in bad else '')

def test_launch_is_checked():
    for bad in (dict(n=48, threadgroup=32), dict(n=2048), dict(layout='vulkan')):
        with pytest.raises(ValueError): run1('out[0] = 0;', ((1,), F32), **bad)
    with pytest.raises(ValueError, match='x: kernels have no type for int64'): run1('out[0] = x[0];', ((1,), F32), x=np.arange(3))

def test_no_compiler(monkeypatch):
    "An error with a clear message; these tests are never skipped"
    monkeypatch.setattr(emulator.shutil, 'which', lambda name: None)
    emulator.compiler.cache_clear()
    try:
        with pytest.raises(NoCompiler, match=r'install g\+\+ or clang\+\+'): run1('out[0] = 4321;', ((1,), F32))
    finally: emulator.compiler.cache_clear()

def test_an_error_leaves_the_emulator_usable():
    fails(DataRace, 'm', exchange('', 1), **WIDE)
    assert (run1(exchange(TG, 1), **WIDE)==np.arange(64)^1).all()
