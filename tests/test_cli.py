"The command line: help, errors in one line, JSON, and its commands on the embedded model at a small size."
import json, os, re, signal, subprocess, sys, time
import mlx.core as mx, pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache
from typer.testing import CliRunner
import veloxquant_mlx
from veloxquant_mlx import QuantizerConfigError, cli
from veloxquant_mlx.models.load import load_model

commands = ['auto-config', 'methods', 'generate', 'context', 'compare', 'describe', 'allocate', 'calibrate', 'demo']

@pytest.fixture(scope='module')
def loaded(): return load_model()

@pytest.fixture
def once(loaded, monkeypatch):
    "the commands get one model instead of loading it each time"
    monkeypatch.setattr(cli, 'load_model', lambda name=None: loaded if name is None else load_model(name))

def run(*args, code=0, **kw):
    r = CliRunner().invoke(cli.app, [str(a) for a in args], prog_name='veloxquant', **kw)
    assert r.exit_code==code, r.output
    assert 'Traceback' not in r.output
    return r

def fails(*args, code=2, **kw):
    r = run(*args, code=code, **kw)
    assert r.stdout=='' and r.stderr.startswith('error: ') and r.stderr.count('\n')==1
    return r.stderr[7:].rstrip('\n')

def spawn(*args, **kw): return subprocess.run([sys.executable, '-c', 'from veloxquant_mlx.cli import main; main()', *map(str, args)], capture_output=True, text=True, **kw)

# --- help and errors

@pytest.mark.parametrize('command', commands)
def test_help(command):
    for flag in ('--help', '-h'): assert 'Usage: veloxquant '+command in run(command, flag).stdout

def test_front_page():
    for args in ((), ('--help',)):
        text = run(*args).stdout
        assert all(c in text for c in commands)
    assert run('--version').stdout.strip()==veloxquant_mlx.__version__

@pytest.mark.parametrize('args,message', [
    (('bogus',), "No such command 'bogus'"), (('demos',), "Did you mean 'demo'"), (('auto-config', '--bogus'), 'No such option'),
    (('auto-config', '--seq-len', 'long'), "Invalid value for '--seq-len'"), (('auto-config', '--seq-len'), "requires an argument"),
    (('auto-config', '--seq-len', 0), 'seq_len must be >= 1 (got 0)'), (('auto-config', '--head-dim', 96), 'head_dim must be a power of 2 (got 96)'),
    (('auto-config', '--total-memory-bytes', 0), 'total_memory_bytes must be >= 1 (got 0)'),
    (('generate', '-p', 'x', '--method', 'zip'), 'method must be one of turboquant_prod, '), (('generate', '-p', 'x', '--auto', '--method', 'kivi'), '--auto and --method exclude each other'),
    (('generate', '-p', 'x', '--method', 'kivi', '-o', 'kivi_group=3'), "kivi has no option 'kivi_group' (did you mean kivi_group_size?)"),
    (('generate', '-p', 'x', '--method', 'kivi', '-o', 'h2o_budget=3'), "kivi has no option 'h2o_budget'"), (('generate', '-p', 'x', '--method', 'kivi', '-o', 'x'), 'an option must be name=value'),
    (('generate', '-p', ' '), 'the prompt must not be empty'), (('generate', '-p', 'x', '--save', 'a.npz'), "--save must be a .safetensors file in a directory that exists (got 'a.npz')"), (('generate', '-p', 'x', '--save', 'no/such/a.safetensors'), '--save must be a .safetensors file'), (('generate', '-p', 'x', '--max-tokens', 0), "Invalid value for '--max-tokens'"),
    (('generate', '-p', 'x', '-m', './no/such/folder'), 'no such folder: ./no/such/folder'), (('compare', '-m', 'no/such.gguf'), 'no such file: no/such.gguf'),
    (('allocate', '--average-bits', 1), 'avg_bits must be >= 2, the smallest of bit_choices (got 1.0)'), (('allocate', '--choices', '2;3'), "--choices must be ints, as in 2,3,4 (got '2;3')"),
    (('allocate', '--choices', '2,9'), 'bit_width_inlier must be one of 1, 2, 3, 4, 5, 6, 7, 8 for kivi (got 9)'), (('allocate', '--method', 'zip'), 'method must be one of turboquant_prod, '),
    (('allocate', '--mode', 'hessian'), "Invalid value for '--mode'"), (('allocate', '--seq-len', 1), "Invalid value for '--seq-len'"), (('allocate', './none'), 'no such folder'),
    (('calibrate',), "Missing argument 'method'"), (('calibrate', 'spectral'), "Missing option '--out'"), (('calibrate', 'zip', '-o', 'x'), 'method must be one of turboquant_prod, '),
    (('calibrate', 'kivi', '-o', 'x'), "(got 'kivi')"), (('calibrate', 'spectral', './none', '-o', 'x'), 'no such folder'), (('calibrate', 'spectral', '-o', __file__), "Invalid value for '--out'"),
    (('calibrate', 'spectral', '-o', 'x', '--text', './none'), "Invalid value for '--text'"), (('calibrate', 'spectral', '-o', 'x', '--name', '../y'), "store: a key must be names joined by '/'"),
    (('calibrate', 'spectral', '-o', 'x', '--tokens', 0), "Invalid value for '--tokens'"),
    (('describe', '-m', './none'), 'no such folder'), (('demo', '-m', './none'), 'no such folder'),
    (('compare', '--methods', ','), '--methods must name at least one method'), (('compare', '--methods', 'kivi:bit_width_inlier=99'), 'bit_width_inlier must be one of'),
    (('compare', '--tokens', 100, '--prefill', 100), 'prefill must be < tokens, 100 (got 100)')])
def test_errors_are_one_line(args, message): assert message in fails(*args)

def test_values_are_checked_before_a_cache_is_made(once):
    assert fails('generate', '-p', 'x', '--method', 'kivi', '-o', 'kivi_group_size=4')=='kivi_group_size must be >= 8 (got 4)'
    assert fails('generate', '-p', 'x', '-o', 'kivi_group_size=32')=="--option needs --method (got 'kivi_group_size=32')"
    assert 'bit_width_inlier must have 30 elements' in fails('generate', '-p', 'x', '--method', 'kivi', '-o', 'bit_width_inlier=[2,4]')
    assert 'n must be between 1 and' in fails('compare', '--tokens', 10**6, '--methods', 'kivi')

def test_interrupt_and_our_own_bugs(monkeypatch):
    def interrupted(_): raise KeyboardInterrupt
    monkeypatch.setattr(cli, 'load_model', interrupted)
    r = run('demo', code=130)
    assert (r.stdout, r.stderr)==('', '')
    def buggy(_): raise TypeError('a bug')
    monkeypatch.setattr(cli, 'load_model', buggy)
    assert isinstance(CliRunner().invoke(cli.app, ['demo']).exception, TypeError)

def test_warnings_are_one_line(monkeypatch, loaded):
    import warnings
    def loud(_):
        warnings.warn('careful\nhere')
        return loaded
    monkeypatch.setattr(cli, 'load_model', loud)
    assert 'warning: careful here\n' in run('describe', '--method', 'kivi').stderr

def test_the_command_itself():
    r = spawn('auto-config', '--head-dim', 3)
    assert (r.returncode, r.stdout, r.stderr)==(2, '', 'error: head_dim must be a power of 2 (got 3)\n')
    r = spawn('auto-config', '--json')
    assert r.returncode==0 and json.loads(r.stdout)['config']['method']=='kivi' and r.stderr==''

@pytest.mark.skipif(os.name=='nt', reason='no SIGINT to a child')
def test_ctrl_c():
    code = "import sys, time; from veloxquant_mlx import cli; cli.load_model = lambda _: (print('ready', flush=True), time.sleep(60)); cli.main()"
    p = subprocess.Popen([sys.executable, '-c', code, 'demo'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert p.stdout.readline()=='ready\n'
    time.sleep(.2)
    p.send_signal(signal.SIGINT)
    assert p.communicate()==('', '') and p.returncode==130

# --- auto-config and methods

def config(*args): return json.loads(run('auto-config', *args, '--json').stdout)

def test_auto_config_json():
    args = '--head-dim 128 --seq-len 32000 --n-layers 32 --batch-size 4 --total-memory-bytes 34359738368 --active-memory-bytes 4294967296'.split()
    assert json.dumps(config(*args))==json.dumps(dict(
        workload=dict(head_dim=128, seq_len=32000, n_layers=32, batch_size=4), hardware=dict(total_memory_bytes=34359738368, active_memory_bytes=4294967296),
        config=dict(method='kvquant', head_dim=128, kvquant_bits=3, kvquant_group_size=32, kvquant_outlier_fraction=.01),
        reason='seq_len=32000 >= 16384 (long context): selected kvquant (3-bit NUQ + outlier isolation) for aggressive compression'))

def test_auto_config_defaults_and_hardware(monkeypatch):
    monkeypatch.setattr(mx, 'device_info', lambda: dict(memory_size=2**40))
    d = config()
    assert d['workload']==dict(head_dim=128, seq_len=4096, n_layers=1, batch_size=1)
    assert d['config']==dict(method='kivi', head_dim=128, bit_width_inlier=2, kivi_group_size=32)
    assert d['hardware']['total_memory_bytes']==2**40
    assert config('--active-memory-bytes', 2**39)['hardware']==d['hardware'] # ignored without the total
    assert config('--total-memory-bytes', 2**20)['hardware']==dict(total_memory_bytes=2**20, active_memory_bytes=0)
    assert config('--total-memory-bytes', 2**20)['config']==dict(method='gear', head_dim=128, gear_bits=2, gear_group_size=32)
    assert config('--seq-len', 100, '--head-dim', 256)['config']==dict(method='turboquant_rvq', head_dim=256, bit_width_inlier=4)
    monkeypatch.delattr(mx, 'device_info')
    assert config()['hardware']==dict(total_memory_bytes=None, active_memory_bytes=0)

def test_auto_config_in_words():
    text = run('auto-config', '--seq-len', 100, '--total-memory-bytes', 2**40).stdout
    assert 'turboquant_rvq: head_dim=128, bit_width_inlier=4' in text and 'seq_len=100 < 2048 (short context)' in text

def test_methods():
    facts = json.loads(run('methods', '--json').stdout)
    from veloxquant_mlx.engine.registry import methods
    assert [f['name'] for f in facts]==list(methods())
    text = run('methods').stdout
    assert all(f['name'] in text and f['paper'] in text for f in facts)

def test_options_as_text():
    assert cli.read_options('kvquant', ['kvquant_bits=4', 'seed=7', 'capacity=None', 'dtype=bfloat16', 'fused_sdpa=TRUE', 'kvquant_outlier_fraction=1e-2'])==dict(
        kvquant_bits=4, seed=7, capacity=None, dtype=mx.bfloat16, fused_sdpa=True, kvquant_outlier_fraction=.01)
    with pytest.raises(QuantizerConfigError, match="dtype must be a floating-point mlx dtype"): cli.read_methods('kivi:dtype=int8')
    with pytest.raises(QuantizerConfigError, match="kivi_group_size must be an int .got 'big'."): cli.read_methods('kivi:kivi_group_size=big')
    assert list(cli.read_methods('kivi:bit_width_inlier=[2,4],gear'))==['kivi:bit_width_inlier=[2,4]', 'gear']

# --- on the embedded model, small

def test_generate(once):
    r = run('generate', '--max-tokens', 8, '--method', 'kivi', '-o', 'bit_width_inlier=4', input='What is the capital of France?\n')
    assert r.stdout=='The capital of France is Paris.\n'
    for part in ('Prompt    37 tokens', 'Answer    8 tokens', ' held, ', 'as float16: ratio ', '30 x kivi: head_dim 64, 4 bits'): assert part in r.stderr
    r = run('generate', '-p', 'Once upon a time', '--no-chat', '--max-tokens', 2, '--auto')
    assert 'seq_len=6 < 2048 (short context): selected turboquant_rvq (4-bit)' in r.stderr and '30 x turboquant_rvq' in r.stderr

def test_save(once, tmp_path, loaded):
    "The file is in the stored form, its size is reported, and mlx-lm goes on from it"
    path = tmp_path/'cache.safetensors'
    r = run('generate', '-p', 'Once upon a time '*40, '--no-chat', '--max-tokens', 2, '--method', 'cachegen', '--save', path)
    line, = [l for l in r.stderr.splitlines() if l.startswith('File')]
    assert f'{cli.size_text(path.stat().st_size)} on disk, stored form: ratio ' in line
    caches = load_prompt_cache(str(path))
    assert all(c.method=='cachegen' and c.stored_nbytes for c in caches) and sum(c.stored_nbytes for c in caches)<path.stat().st_size
    assert mx.isfinite(loaded[0](mx.array([[5]]), cache=caches)).all()

def test_context(once, tmp_path):
    "Read, repeated and cut down once; every question begins with the file, which stays as it is"
    text, path, fact = tmp_path/'text.txt', tmp_path/'context.safetensors', 'The captain of the ship is named Elena Marsh.'
    text.write_text(f"{'It rains on the harbour. '*8}{fact}{' The sea is grey and cold.'*8}")
    r = run('context', text, '--save', path, '--keep', .5)
    n = int(re.search(r'Context   (\d+) tokens', r.stderr)[1])
    caches = load_prompt_cache(str(path))
    pairs = sum(sum(c.heads) for c in caches)
    assert '30 x kvzip' in r.stderr and 'arrays as in memory' in r.stderr and .5<pairs/(90*n)<.75 # the template before the text stays
    data = path.read_bytes()
    for question,word in (('What is the name of the captain?', 'Elena'), ('Is the sea warm or cold?', '')):
        r = run('generate', '--context', path, '-p', question, '--max-tokens', 12)
        assert word in r.stdout and '30 x kvzip' in r.stderr and path.read_bytes()==data
    assert 'Elena' in run('generate', '--context', text, '-p', 'What is the name of the captain?', '--method', 'kvzip', '-o', 'kvzip_budget=64', '--max-tokens', 12).stdout
    assert '--method, --option and --auto do not go with a saved context' in fails('generate', '--context', path, '-p', 'x', '--method', 'kivi')
    assert fails('context', text, '--save', path, '--method', 'kivi', '--keep', .5)=="--keep needs --method kvzip (got 'kivi')"
    assert '--save must be a .safetensors file' in fails('context', text, '--save', tmp_path/'a.npz')
    run('generate', '-p', 'x', '--max-tokens', 1, '--method', 'kivi', '--save', path)
    assert '--context must be a text, or a file that `veloxquant context` wrote' in fails('generate', '--context', path, '-p', 'x')

def test_a_prompt_is_announced_before_it_is_read(loaded):
    calls = []
    class Spy(KVCache):
        def expect_prompt(self, n): calls.append((n, self.offset))
    model,tokenizer = loaded
    list(cli.stream(model, tokenizer, [5]*9, [Spy() for _ in model.layers], max_tokens=1, progress=False))
    assert calls==[(9,0)]*30

def test_describe(once):
    text = run('describe', '--method', 'gear').stdout
    assert text.count('GEARCache')==30 and '2 bits' in text
    assert 'selected kvquant' in run('describe', '--seq-len', 20000).stderr

def test_allocate(once):
    args = ('allocate', '--average-bits', 2.5, '--method', 'turboquant_rvq', '--seq-len', 16, '--mode', 'grad')
    d = json.loads(run(*args, '--json').stdout)
    assert (d['method'], d['mode'], d['average_bits'], d['tokens'])==('turboquant_rvq', 'grad', 2.5, 16)
    bits = d['bit_width_inlier']
    assert len(bits)==30 and sum(bits)==75 and set(bits)<={2,3,4} and [r['bits'] for r in d['layers']]==bits
    assert [r['layer'] for r in d['layers']]==list(range(30)) and all(r['compressed'] and r['sensitivity']>0 for r in d['layers'])
    assert d['uniform_cost']['3']<d['cost']<d['uniform_cost']['2'] and d['used']<.25*d['fp16']
    text = run(*args).stdout
    rows = [l.split() for l in text.splitlines() if l.split() and l.split()[0].isdigit()]
    assert [int(r[2]) for r in rows]==bits and 'Average   2.50 bits in 30 layers' in text
    use = text.split("--option '")[1].split("'")[0]
    assert cli.read_options('turboquant_rvq', [use])==dict(bit_width_inlier=bits)

def test_allocate_by_predictions(monkeypatch):
    "a layer with the model's own cache has no bits"
    from tiny_models import tiny
    class Letters:
        def encode(self, text): return [ord(c)%100 for c in text]
    monkeypatch.setattr(cli, 'load_model', lambda name: (tiny(name), Letters()))
    d = json.loads(run('allocate', 'llama_sliding', '--choices', '2,4', '--json').stdout)
    used = [r for r in d['layers'] if r['compressed']]
    assert d['mode']=='kl' and 0<len(used)<len(d['layers']) and d['average_bits']<=3 and {r['bits'] for r in used}<={2,4}
    text = run('allocate', 'llama_sliding').stdout
    assert 'nats a token predicted' in text and text.count('–')==len(d['layers'])-len(used)

@pytest.mark.parametrize('method', ['spectral', 'vecinfer', 'a2ats', 'kvquant', 'skvq', 'amc'])
def test_calibrate(monkeypatch, tmp_path, method):
    "A whole artifact, and the same one from the same text; bars on stderr, nothing but the result on stdout; what is printed is how it is used"
    from tiny_models import tiny
    from veloxquant_mlx.core.artifacts import FileArtifactStore
    from veloxquant_mlx.engine.calibrate import artifact_key
    class Letters:
        def encode(self, text): return [ord(c)%100 for c in text]
    monkeypatch.setattr(cli, 'load_model', lambda name: (tiny('llama'), Letters()))
    small = dict(vecinfer=('--option', 'key_codebook_bits=5'), a2ats=('--option', 'a2ats_codebook_bits=4', '--option', 'seed=3')).get(method, ())
    args = ('calibrate', method, 'org/tiny', '--tokens', 300, '--seq-len', 100, *small)
    r = run(*args, '--out', tmp_path, '--json')
    d, store = json.loads(r.stdout), FileArtifactStore(tmp_path)
    key = 'spectral/tiny' if method=='spectral' else artifact_key(method, tiny('llama'))
    assert (d['key'], d['facts']['rows'], d['facts']['name'])==(key, 300, 'tiny') and all(f'{method}: {o}' in r.stderr for o in ('texts', 'layers'))
    assert store.keys()==[key] and d['bytes']==os.path.getsize(d['path']) and (method!='a2ats' or d['facts']['seed']==3)
    arrays = store.load(key, **d['facts'])
    assert arrays and all(mx.isfinite(a).all() for a in arrays.values())
    text = tmp_path/'text'
    text.write_text('a text of my own. '*40)
    r = run(*args, '--out', tmp_path/'own', '--text', text)
    assert f"KVCacheConfig('{method}', store=FileArtifactStore(" in ' '.join(r.stdout.split()) and FileArtifactStore(tmp_path/'own').manifest(key)['hash']!=d['hash']
    if method=='spectral': assert "SpectralQuantOptions(spectral_model_name='mine')" in ' '.join(run(*args, '--out', tmp_path, '--name', 'mine').stdout.split()) and 'spectral/mine' in store.keys()
    else: assert f'--name must be left out for {method}' in fails(*args, '--out', tmp_path, '--name', 'mine')
    assert json.loads(run(*args, '--out', tmp_path/'new', '--json').stdout)['hash']==d['hash']
    assert f"--tokens must be <= {len(text.read_text())}, the tokens of the text (got 4096)" in fails('calibrate', method, '--out', tmp_path, '--text', text)

def test_an_artifact_store_by_its_directory(monkeypatch, tmp_path):
    "`-o store=DIR` of the other commands"
    from tiny_models import tiny
    class Letters:
        def encode(self, text): return [ord(c)%100 for c in text]
    monkeypatch.setattr(cli, 'load_model', lambda name: (tiny('llama'), Letters()))
    key = json.loads(run('calibrate', 'amc', '--tokens', 200, '--seq-len', 100, '--out', tmp_path, '--json').stdout)['key']
    assert run('describe', '--method', 'amc', '-o', f'store={tmp_path}').stdout.count(key)==3
    assert "store must be the directory of an artifact store (got 'no/such')" in fails('describe', '--method', 'amc', '-o', 'store=no/such')
    assert "spectral has no option 'key_sub_dim'" in fails('calibrate', 'spectral', '--out', tmp_path, '--option', 'key_sub_dim=4')
    assert 'capacity must be an option that the calibration of spectral reads (got 4)' in fails('calibrate', 'spectral', '--out', tmp_path, '--tokens', 200, '--option', 'capacity=4')

def test_compare(once):
    args = ('compare', '--methods', 'kivi:residual_length=32,gear', '--tokens', 160, '--chunk', 32, '--no-needle')
    d = json.loads(run(*args, '--steps', 0, '--json').stdout)
    assert (d['tokens'], d['prefill'], d['chunk'], d['needle_context'], d['speed_context'], d['exact_rows'])==(160, 80, 32, None, None, 'float16')
    plain, kivi, gear = d['rows']
    assert [r['name'] for r in d['rows']]==['plain', 'kivi:residual_length=32', 'gear']
    assert plain['nll_change']==0 and plain['formula'] is None and plain['fp16']==30*2*3*64*160*2
    for r in (kivi, gear): assert r['needle'] is None and r['ratio']==r['fp16']/r['held'] and abs(r['used']/r['formula']-1)<.03
    assert kivi['used']<.5*kivi['fp16']
    r = run('compare', '--methods', 'kivi', '--tokens', 40, '--needle-context', 120, '--speed-context', 16, '--steps', 1)
    assert r.stdout.count('found')==2 and ('exact rows in float16' in ' '.join(r.stdout.split()))==(d['computes_in']=='float32')

def test_demo(once):
    text = ' '.join(run('demo', '--context', 140, '--tokens', 32, '--steps', 1).stdout.split())
    for part in ('30 layers with 3 KV heads of 64', 'Choice turboquant_rvq', 'Why seq_len=', 'plain 4817', 'times less', 'the model still finds the hidden code'): assert part in text
