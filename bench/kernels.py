"""Check and time every kernel on the device at hand; the result is one table.

    python bench/kernels.py                     # everything: a few minutes on a GPU, most of it for compiling
    python bench/kernels.py --only methods --methods kivi --json kivi.json

Attention is that of one new token: 32 query heads, 8 KV heads, 128 channels, half precision. A time is the median over repetitions of
many independent calls in one evaluation, divided by their number. Calls take turns over input sets that together exceed the caches of
the chip. Without GPU kernels the same rows run as array operations, with few tokens.

Encoding a few thousand tokens takes less time on the GPU than MLX needs to hand over one operation. So the same rows are also copied
by MLX itself, which shows what that size can reach at all, and encoding is measured once more with enough tokens to hide the handing over.
"""
import argparse, gc, json, math, statistics, sys, time
import mlx.core as mx, mlx.nn as nn, mlx_lm
from mlx_lm.models.base import quantized_scaled_dot_product_attention
import veloxquant_mlx
from veloxquant_mlx.cache.base import KVCacheFactory
from veloxquant_mlx.config.select import config_of, method_fields
from veloxquant_mlx.engine.attention import attend_rows, merge_parts
from veloxquant_mlx.kernels.attention import Side, decode_attention
from veloxquant_mlx.kernels.encode import group_pack, level_pack, rotate_pack, row_unpack
from veloxquant_mlx.kernels.gather import gather_rows
from veloxquant_mlx.kernels.runtime import backend
from veloxquant_mlx.kernels.snippets import exact_rows, per_token
from veloxquant_mlx.methods.turboquant_rvq import RVQCodec, plane_book, plane_table
from veloxquant_mlx.ops.affine import dequantize_per_token, quantize_per_channel, quantize_per_token
from veloxquant_mlx.ops.codebook import nearest_level
from veloxquant_mlx.ops.packing import pack_codes
from veloxquant_mlx.ops.rope import rope_params

H, R, D, GROUP = 8, 4, 128, 32 # KV heads, query heads for each, channels, channels that share a scale
SCALE = D**-.5
METHODS = 'turboquant_rvq', 'kivi', 'kvquant', 'gear'
PARTS = 'attention', 'methods', 'encode', 'memory'
CHIP = 60_000_000 # bytes that the caches of a chip may hold
LIMIT = 2e-3 # relative error of attention
FEW, MANY = 4096, 65536 # tokens to encode; results are checked where they are few

# --- inputs

def rows(B, T, n_heads=H): return mx.random.normal((B, n_heads, T, D)).astype(mx.float16)
def query(B): return rows(B, 1, H*R)

def random_codes(B, T, bits):
    "Random words, with scales and zeros that spread the numbers over about -2 to 2"
    words = mx.random.randint(0, 256, (B, H, T, D*bits//8)).astype(mx.uint8).view(mx.uint32)
    step = (mx.random.uniform(.75, 1.25, (B, H, T, D//GROUP))*4/(2**bits-1)).astype(mx.float16)
    return words, step, (-step*(2**bits-1)/2).astype(mx.float16)

def filled(name, T, chunk=16384):
    "A method's cache at the selector's settings after T random tokens"
    cache = KVCacheFactory.create(config_of(name, D, **method_fields(name, D)))
    cache.bind(0, D, rope_params(nn.RoPE(D)), False, False, 'the benchmark')
    for a in range(0, T, chunk):
        cache.update_and_fetch(*(rows(1, min(chunk, T-a)) for _ in 'kv'))
        mx.eval(cache.payload())
    return cache

def step(cache, q):
    "One decode step"
    cache.update_and_fetch(rows(1, 1), rows(1, 1))
    mx.eval(cache.attend(q, SCALE))

def twin(cache):
    "The same cache in memory of its own"
    new = type(cache).from_state(cache.state)
    mx.eval(new.payload())
    return new

# --- references

def exact_attention(q, tile, T): # tile(a, b): keys and values of tokens a to b
    "Attention in float32, piece by piece and without matrix products, whose inputs a GPU may round"
    parts, n = [], max(128, 2**25//q.size)
    q = q.astype(mx.float32).reshape(len(q), H, R, 1, D)*SCALE
    for a in range(0, T, n):
        k, v = (x[:, :, None].astype(mx.float32) for x in tile(a, min(a+n, T)))
        scores = (q*k).sum(axis=-1, keepdims=True)
        lse = mx.logsumexp(scores, axis=3, keepdims=True)
        parts.append(((mx.exp(scores-lse)*v).sum(axis=3, keepdims=True), lse))
        mx.eval(parts[-1])
    return merge_parts(parts).reshape(len(q), H*R, 1, D)

def distance(x, exact): return (mx.linalg.norm((x.astype(mx.float32)-exact).flatten())/mx.linalg.norm(exact.flatten())).item()

def attention_error(out, q, k, v, read=lambda x: x[0]): # read: rows of one side from its arrays
    return distance(out, exact_attention(q, lambda a, b: [read([o[:, :, a:b] for o in side]) for side in (k, v)], k[0].shape[2]))

def cache_error(out, cache, q):
    "Queries and outputs change their basis on the CPU, in full precision"
    k, v = cache.keys_stream, cache.values_stream
    x = q.astype(mx.float32).reshape(1, H, R, D)
    with mx.stream(mx.cpu): basis = k.codec.to_basis(x).reshape(q.shape)
    exact = exact_attention(basis, lambda a, b: (k.read(a, b), v.read(a, b)), cache.offset)
    with mx.stream(mx.cpu): return distance(out, v.codec.from_basis(exact.reshape(1, H, R, D)).reshape(out.shape))

def arrays(o): return [o] if isinstance(o, mx.array) else list(o)

def share_differing(got, want): # share of numbers
    return sum((a!=b).sum().item() for a,b in zip(got, want, strict=True))/sum(a.size for a in want)

def share_decoded_differing(got, want):
    "Rotations round differently: what codes stand for is compared"
    a, b = (RVQCodec(4, D, 0).decode(o, 0) for o in (got, want))
    return (mx.abs(a-b)>LIMIT*mx.abs(b)).mean().item()

# --- measuring

def nbytes(o):
    "Bytes of all arrays; a cache counts without slack"
    if isinstance(o, mx.array): return o.nbytes
    return sum(map(nbytes, o)) if isinstance(o, (tuple, list)) else o.used_nbytes

def free():
    "Give back what is no longer used"
    gc.collect()
    mx.synchronize()
    mx.clear_cache()

def evaluated(o):
    mx.eval([a for a in arrays(o) if isinstance(a, (mx.array, tuple, list))])
    return o

def clock(calls, n, repetitions):
    "Median seconds of one call: evaluating it, building its graph, both"
    def build(): return [calls[i%len(calls)]() for i in range(n)]
    for _ in range(min(2, repetitions)): mx.eval(build())
    times = []
    for _ in range(repetitions):
        mx.synchronize()
        begin = time.perf_counter(); out = build()
        built = time.perf_counter(); mx.eval(out); mx.synchronize()
        end = time.perf_counter(); del out
        times.append(((end-built)/n, (built-begin)/n, (end-begin)/n))
    return [statistics.median(o) for o in zip(*times)]

class Bench:
    "Rows of the table, measured one after the other"
    def __init__(self, quick):
        self.gpu, self.kernels = mx.default_device()==mx.Device(mx.gpu), backend() is not None
        self.calls = 2 if not self.gpu else 32 if quick else 128 # the first ones wait for their graph
        self.repetitions = 1 if not self.gpu else 3 if quick else 7
        self.rows, self.memory, self.failed, self.begin = [], [], False, time.perf_counter()
        big = mx.random.normal((2**22 if not self.gpu else 2**26 if quick else 2**28,)) # 1 GiB
        mx.eval(big)
        self.copy = 2*big.nbytes/min(clock([f], 4, self.repetitions)[0] for f in (lambda: big+0, lambda: -big))

    def row(self, what, B, T, make, call, error=None, # make() → inputs; call(*inputs) → outputs; error(outputs, *inputs) → number
        limit=LIMIT, moved=None, kernel=True, ours=True, calls=None, **more): # moved(inputs, outputs) → bytes, if not all of them
        "Measure and check one case; an exception is its result"
        row = dict(what=what, B=B, T=T, kernel=kernel and self.kernels and ours) | more
        try:
            inputs = evaluated(make())
            out = evaluated(call(*inputs))
            row['bytes'] = moved(inputs, out) if moved else nbytes([inputs, out])
            if error: row['error'] = error(out, *inputs)
            n = (calls or self.calls) if row['kernel'] or not ours else 1
            sets = [evaluated(make()) for _ in range(min(n, max(3, -(-3*CHIP//row['bytes']))))] # new ones: what a CPU has read stays in its memory
            row['seconds'], row['host'], row['total'] = clock([lambda s=s: call(*s) for s in sets], n, self.repetitions)
            if not row.get('error', 0)<=limit: row['problem'] = f"error {row['error']:.1e} > {limit:g}"
        except Exception as e: row['problem'] = f'{type(e).__name__}: {e}'
        self.failed |= ours and 'problem' in row
        self.rows.append(row)
        done = f"{1e6*row['seconds']:9.1f} us" if 'seconds' in row else ''
        self.say(what, f'{B} x {T}', done, f"error {row['error']:.1e}" if 'error' in row else '', row.get('problem', '')[:600])

    def say(self, what, *words):
        "Progress, with the seconds since the start"
        print(f'{time.perf_counter()-self.begin:6.1f} s  {what:25}', *words, file=sys.stderr, flush=True)

    # baselines

    def sdpa(self, B, T):
        self.row('mlx fp16 sdpa', B, T, lambda: (query(B), [rows(B, T)], [rows(B, T)]),
            lambda q, k, v: mx.fast.scaled_dot_product_attention(q, *k, *v, scale=SCALE), attention_error, limit=math.inf, ours=False)

    def mlx_lm(self, T, bits, group):
        def make(): return query(1), *(mx.quantize(rows(1, T), group, bits) for _ in 'kv')
        def call(q, k, v): return quantized_scaled_dot_product_attention(q+0, k, v, scale=SCALE, mask=None, group_size=group, bits=bits) # scales its query in place
        self.row(f'mlx-lm {bits} bit group {group}', 1, T, make, call, ours=False, bits=bits, group=group)

    # attention over rows that no cache holds

    def fp16_rows(self, B, T):
        def call(q, k, v):
            if not self.kernels: return attend_rows(q, *k, *v, SCALE)
            return decode_attention(q, *(Side(D, exact_rows(D, True), tuple(o), 0, T) for o in (k, v)), SCALE, dtype=mx.float16)[0]
        self.row('fp16 rows', B, T, lambda: (query(B), [rows(B, T)], [rows(B, T)]), call, attention_error)

    def affine(self, B, T, bits):
        def read(x): return dequantize_per_token(*x, bits, GROUP, D)
        def call(q, k, v):
            if not self.kernels: return attend_rows(q, read(k), read(v), SCALE)
            return decode_attention(q, *(Side(D, per_token(bits, GROUP, D), o, 0, T) for o in (k, v)), SCALE, dtype=mx.float16)[0]
        self.row(f'affine {bits} bit', B, T, lambda: (query(B), random_codes(B, T, bits), random_codes(B, T, bits)), call,
            lambda *a: attention_error(*a, read), bits=bits)

    # caches

    def method(self, name, T, timed=True, peak=True):
        bits = next(v for k,v in method_fields(name, D).items() if 'bit' in k)
        what = f'{name} {bits} bit'
        try:
            free()
            held = mx.get_active_memory()
            cache, q = filled(name, T-32), query(1) # a few tokens less: buffers that are exactly full would grow at the next one
            for _ in range(2): step(cache, q) # the first may enlarge buffers
            if peak:
                free()
                mx.reset_peak_memory()
                step(cache, q)
                m = dict(what=what, T=T, used=cache.used_nbytes, allocated=cache.nbytes, peak=mx.get_peak_memory()-held)
                self.memory.append(m)
                self.say(what, f"one step: {m['peak']/1e6:.1f} MB for {m['used']/1e6:.1f} MB")
            caches = iter([cache])
            def make(): return next(caches, None) or twin(cache), query(1)
            if timed: self.row(what, 1, T, make, lambda c, q: c.attend(q, SCALE), cache_error, kernel=cache.no_kernel is None, bits=bits, no_kernel=cache.no_kernel)
        except Exception as e:
            self.rows.append(dict(what=what, B=1, T=T, kernel=False, problem=f'{type(e).__name__}: {e}'))
            self.failed = True
            self.say(what, self.rows[-1]['problem'][:600])

    # encoding

    def encoding(self, what, T, f, plain, make=None, compare=share_differing, limit=0, moved=None): # f with kernels, plain without
        "The error is the share of numbers that differ from those of array operations on the CPU"
        def error(out, *inputs):
            with mx.stream(mx.cpu): return compare(arrays(out), arrays(plain(*inputs)))
        few = T<=FEW
        self.row(what, 1, T, make or (lambda: (rows(1, T),)), f if self.kernels else plain, error if self.kernels and few else None, limit, moved, calls=self.encode_calls(T))

    def encode_calls(self, T): # waiting for the end takes a fraction of a millisecond, which short calls must share
        return 4*self.calls if self.gpu and T<=FEW else max(2, self.calls//4)

    def encodings(self, T):
        self.row('mlx copy', 1, T, lambda: (rows(1, T),), lambda x: x+0, ours=False, calls=self.encode_calls(T))
        for bits in (4, 2):
            for per,plain in dict(token=quantize_per_token, channel=quantize_per_channel).items():
                self.encoding(f'group_pack {bits} bit {per}', T, lambda x, bits=bits, per=per: group_pack(x, bits, GROUP, per=per), lambda x, bits=bits, plain=plain: plain(x, bits, GROUP))
        levels, book = plane_table(4, None, 1)[:, 0], plane_book(4, None)
        self.encoding('rotate_pack 2+2 bit', T, lambda x: rotate_pack(x, book, (2, 2), 0), lambda x: RVQCodec(4, D, 0).encode(x, 0), compare=share_decoded_differing, limit=1e-3)
        self.encoding('level_pack 4 bit', T, lambda x: level_pack(x, book, 4), lambda x: pack_codes(nearest_level(x.astype(mx.float32), levels), 4))
        self.encoding('row_unpack 4 bit token', T, lambda w, s, z: row_unpack(w, 4, D, s, z, group_size=GROUP),
            lambda w, s, z: dequantize_per_token(w, s, z, 4, GROUP, D).astype(mx.float16), make=lambda: random_codes(1, T, 4))
        def kept(): return mx.sort(mx.argsort(mx.random.uniform(shape=(1, H, T)), axis=-1)[..., :T//2], axis=-1).astype(mx.int32)
        self.encoding('gather_rows, half', T, gather_rows, lambda x, i: mx.take_along_axis(x, i[..., None], axis=2), make=lambda: (rows(1, T), kept()),
            moved=lambda inputs, out: inputs[1].nbytes+2*out.nbytes) # only these rows are read

    # results

    def finish(self):
        "Rates and ratios"
        def seconds(B, T, start, **where): return next((r['seconds'] for r in self.rows if r['what'].startswith(start) and 'seconds' in r
            and (r['B'], r['T'])==(B, T) and all(r.get(k)==v for k,v in where.items())), None)
        for r in self.rows:
            if 'seconds' not in r: continue
            r['share'] = r['bytes']/r['seconds']/self.copy
            rivals = dict(fp16=seconds(r['B'], r['T'], 'mlx fp16')) if 'bits' in r or 'fp16' in r['what'] else {}
            if 'bits' in r and 'group' not in r: rivals |= {f'lm{g}': seconds(r['B'], r['T'], 'mlx-lm', bits=r['bits'], group=g) for g in (32, 64)}
            r |= {k: v/r['seconds'] for k,v in rivals.items() if v}

# --- output

def number(x, digits=1, factor=1):
    "'-' where there is none"
    return '-' if x is None else f'{factor*x:.{0 if abs(factor*x)>=1000 else digits}f}'

def markdown(head, lines):
    "A table; numbers to the right"
    widths = [max(2, *map(len, column)) for column in zip(head, *lines)]
    def line(cells): return '|'+'|'.join(c.ljust(w) if not i else c.rjust(w) for i,(c,w) in enumerate(zip(cells, widths)))+'|'
    return '\n'.join([line(head), '|'+'|'.join('-'*w if not i else '-'*(w-1)+':' for i,w in enumerate(widths))+'|', *map(line, lines)])

def times_table(found):
    head = 'what', 'kernel', 'B', 'T', 'us', 'MB', 'GB/s', 'copy', 'fp16', 'lm 32', 'lm 64', 'error', 'host', 'total'
    def cells(r):
        t, e = r.get('seconds'), r.get('error')
        return [r['what'], 'yes' if r['kernel'] else '-', str(r['B']), str(r['T']), number(t, factor=1e6) if t or 'problem' not in r else 'failed', number(r.get('bytes'), factor=1e-6),
            number(t and r['bytes']/t, factor=1e-9), number(r.get('share'), 0, 100)+'%'*(t is not None), *(number(r.get(k), 2)+'x'*(k in r) for k in ('fp16', 'lm32', 'lm64')),
            '-' if e is None else '0' if not e else f'{e:.1e}', number(r.get('host'), factor=1e6), number(r.get('total'), factor=1e6)]
    return markdown(head, [cells(r) for r in found])

def memory_table(found):
    mb = lambda n: number(n, factor=1e-6)
    return markdown(('one decode step', 'T', 'used MB', 'allocated MB', 'peak MB', 'peak/used', 'peak/allocated'),
        [[m['what'], str(m['T']), mb(m['used']), mb(m['allocated']), mb(m['peak']), number(m['peak']/m['used'], 3), number(m['peak']/m['allocated'], 3)] for m in found])

def report(bench, about):
    "All of it as Markdown"
    versions = ', '.join(f'{k} {v}' for k,v in about['versions'].items())
    out = [f"## Kernels on {about['device']}", f'''{versions}; back end: {about['backend'] or 'none'}
Device copy: {bench.copy/1e9:.0f} GB/s, read and written; times are medians of {bench.repetitions} times {bench.calls} calls''']
    if not bench.kernels: out.append('**There are no GPU kernels on this device: all rows are array operations, with few tokens.**')
    if bench.rows: out += [times_table(bench.rows), """us: evaluating one call; host: building its graph; total: both. copy: share of the device copy's GB/s. fp16,
lm 32, lm 64: how many times faster than mlx fp16 sdpa and than mlx-lm's quantized attention (group 32, 64).
error: relative, against float32 attention over the decoded rows; where rows are encoded: share of numbers
that differ from those of array operations."""]
    if bench.memory: out += [memory_table(bench.memory), 'A step that enlarges the buffers holds old and new ones for a moment and needs more.']
    notes = [f"- {r['what']}, B {r['B']}, T {r['T']}: {r['problem'][:600]}" for r in bench.rows if 'problem' in r]
    if bench.kernels: notes += [f"- {r['what']}: array operations, since {r['no_kernel']}" for r in bench.rows if r.get('no_kernel')]
    return '\n\n'.join(out+(['\n'.join(notes)] if notes else []))

def length(text): # '8x16384' → (8, 16384)
    B, T = (int(o) for o in text.split('x')) if 'x' in text else (1, int(text))
    if B<1 or T<32 or T%32: raise argparse.ArgumentTypeError(f"tokens must be a multiple of 32 (got {text})")
    return B, T

def main(args=None)->int: # 1 if a kernel failed or is wrong
    p = argparse.ArgumentParser(description='Check and time every kernel on the device at hand.')
    p.add_argument('--lengths', nargs='+', type=length, metavar='[Bx]T', help='cached tokens, e.g. 131072 8x16384; caches are filled to the longest with B = 1')
    p.add_argument('--methods', nargs='+', choices=METHODS, default=METHODS)
    p.add_argument('--only', nargs='+', choices=PARTS, default=PARTS, help='parts to run')
    p.add_argument('--rivals', nargs='*', type=lambda o: tuple(map(int, o.split('/'))), default=[(4, 32)], metavar='BITS/GROUP', help="mlx-lm's quantized attention to compare with")
    p.add_argument('--json', metavar='FILE', help='write all figures there')
    p.add_argument('--quick', action='store_true', help='one length, few repetitions')
    a = p.parse_args(args)
    mx.random.seed(0)
    b = Bench(a.quick)
    lengths = a.lengths or ([(1, 512)] if not b.gpu else [(1, 16384)] if a.quick else [(1, 131072), (1, 32768), (8, 16384)])
    longest = max((T for B,T in lengths if B==1), default=max(T for _,T in lengths))
    about = dict(device=str(mx.device_info().get('device_name', mx.default_device())), backend=backend() and backend().name,
        versions={'veloxquant_mlx': veloxquant_mlx.__version__, 'mlx': mx.__version__, 'mlx-lm': mlx_lm.__version__})
    b.say(about['device'], f"{'kernels' if b.kernels else 'no GPU kernels: array operations instead'}; copy {b.copy/1e9:.0f} GB/s")
    shapes, bits = (lengths if 'attention' in a.only else []), (4, 2, 3, 8)
    timed, peak = 'methods' in a.only, 'memory' in a.only
    for B,T in dict.fromkeys([*shapes, *([(1, longest)] if timed else [])]): b.sdpa(B, T); free()
    for B,T in shapes:
        b.fp16_rows(B, T); free()
        for n in bits: b.affine(B, T, n); free()
    if timed or peak:
        for n in a.methods: b.method(n, longest, timed, peak); free()
    if 'encode' in a.only:
        for T in dict.fromkeys([min(FEW, longest), *([MANY] if b.gpu and not a.quick else [])]): b.encodings(T); free()
    for n,g in a.rivals if timed or (1, longest) in shapes else (): b.mlx_lm(longest, n, g); free() # last: MLX compiles its quantized products for most of a minute
    b.say('done')
    b.finish()
    print(report(b, about), flush=True)
    if a.json:
        with open(a.json, 'w') as f: json.dump(about | dict(copy=b.copy, ok=not b.failed, rows=b.rows, memory=b.memory), f, indent=1)
    return int(b.failed)

if __name__ == '__main__': sys.exit(main())
