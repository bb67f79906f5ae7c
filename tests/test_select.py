"The selector against its reference page: thresholds, reasons, JSON, errors; and the package's front door."
import json, subprocess, sys, warnings
import mlx.core as mx, pytest
from veloxquant_mlx import HardwareInfo, KVCacheFactory, QuantizerConfigError, WorkloadSpec, detect_hardware_info, select_kv_cache_config
from veloxquant_mlx.config.select import config_of, memory_pressure, model_workload

GiB = 2**30
unknown = HardwareInfo()

def pick(hardware=unknown, **workload): return select_kv_cache_config(WorkloadSpec(**workload), hardware)

@pytest.mark.parametrize('seq_len,method', [(1,'turboquant_rvq'), (2047,'turboquant_rvq'), (2048,'kivi'), (16383,'kivi'), (16384,'kvquant'), (10**7,'kvquant')])
def test_length(seq_len, method): assert pick(seq_len=seq_len).config.method==method

def test_what_each_choice_sets():
    c = pick(seq_len=100).config
    assert (c.method, c.bit_width_inlier)==('turboquant_rvq', 4)
    c = pick(seq_len=5000).config
    assert (c.method, c.bit_width_inlier, c.kivi_group_size)==('kivi', 2, 32)
    c = pick(seq_len=32000).config
    assert (c.method, c.kvquant_bits, c.kvquant_group_size, c.kvquant_outlier_fraction)==('kvquant', 3, 32, .01)
    c = pick(HardwareInfo(1)).config
    assert (c.method, c.gear_bits, c.gear_group_size)==('gear', 2, 32)

@pytest.mark.parametrize('head_dim,group', [(64,32), (128,32), (256,64), (512,64)])
def test_wide_heads_double_the_group(head_dim, group):
    for hardware,seq_len,field in ((unknown,5000,'kivi_group_size'), (unknown,32000,'kvquant_group_size'), (HardwareInfo(1),100,'gear_group_size')):
        r = pick(hardware, head_dim=head_dim, seq_len=seq_len)
        assert getattr(r.config, field)==group and (f'group size {group}' in r.reason)==(group==64)
    r = pick(head_dim=head_dim, seq_len=100)
    assert r.config.bit_width_inlier==4 and 'group size' not in r.reason

@pytest.mark.parametrize('seq_len', [100, 5000, 32000])
def test_memory_overrules_length_from_three_quarters_on(seq_len):
    spec = WorkloadSpec(seq_len=seq_len, n_layers=32, batch_size=2)
    total = 4*spec.fp16_nbytes
    at, below = HardwareInfo(total, 2*spec.fp16_nbytes), HardwareInfo(total, 2*spec.fp16_nbytes-1)
    assert memory_pressure(spec, at)==.75
    assert select_kv_cache_config(spec, at).config.method=='gear'
    assert select_kv_cache_config(spec, below).config.method==pick(seq_len=seq_len).config.method

def test_footprint():
    "keys and values, two bytes a number, eight KV heads unless said"
    assert WorkloadSpec(128, 8192, 32).fp16_nbytes==GiB
    assert WorkloadSpec(64, 10, 3, 5, n_kv_heads=2).fp16_nbytes==2*2*64*10*3*5*2
    hardware = HardwareInfo(32*GiB, 4*GiB)
    assert pick(hardware, seq_len=64_000, n_layers=32, batch_size=4).config.method=='gear'
    assert pick(hardware, seq_len=64_000, n_layers=32, batch_size=1).config.method=='kvquant'
    assert pick(hardware, seq_len=64_000, n_layers=1, batch_size=4).config.method=='kvquant'

def test_reasons():
    assert pick(head_dim=128, seq_len=100).reason=="seq_len=100 < 2048 (short context): selected turboquant_rvq (4-bit) for higher precision"
    assert pick(seq_len=32000).reason=="seq_len=32000 >= 16384 (long context): selected kvquant (3-bit NUQ + outlier isolation) for aggressive compression"
    assert pick(seq_len=4096).reason=="seq_len=4096 >= 2048 (mid-length context): selected kivi (2-bit) for a balanced default"
    assert pick(HardwareInfo(32*GiB, 4*GiB), seq_len=64_000, n_layers=32, batch_size=4).reason==(
        "31.2 GiB fp16 cache + 4.0 GiB active >= 75% of 32.0 GiB (memory pressure): selected gear (2-bit) to fit in memory")

def test_json_of_the_page():
    r = select_kv_cache_config(WorkloadSpec(head_dim=128, seq_len=32000, n_layers=32, batch_size=4), HardwareInfo(34359738368, 4294967296))
    assert json.dumps(r.as_dict())==json.dumps(json.loads('''{
      "workload": {"head_dim": 128, "seq_len": 32000, "n_layers": 32, "batch_size": 4},
      "hardware": {"total_memory_bytes": 34359738368, "active_memory_bytes": 4294967296},
      "config": {"method": "kvquant", "head_dim": 128, "kvquant_bits": 3, "kvquant_group_size": 32, "kvquant_outlier_fraction": 0.01},
      "reason": "seq_len=32000 >= 16384 (long context): selected kvquant (3-bit NUQ + outlier isolation) for aggressive compression"
    }'''))

@pytest.mark.parametrize('bad,message', [
    (dict(head_dim=96), "head_dim must be a power of 2 (got 96)"), (dict(head_dim=0), "head_dim must be >= 2 (got 0)"),
    (dict(head_dim=128.), "head_dim must be an int (got 128.0)"), (dict(seq_len=0), "seq_len must be >= 1 (got 0)"),
    (dict(seq_len=True), "seq_len must be an int (got True)"), (dict(n_layers=-1), "n_layers must be >= 1 (got -1)"),
    (dict(batch_size=0), "batch_size must be >= 1 (got 0)"), (dict(n_kv_heads=0), "n_kv_heads must be >= 1 (got 0)")])
def test_a_wrong_workload_is_refused(bad, message):
    with pytest.raises(QuantizerConfigError) as e: WorkloadSpec(**bad)
    assert str(e.value)==message

def test_other_errors():
    for bad in (dict(total_memory_bytes=0), dict(active_memory_bytes=-1)):
        with pytest.raises(QuantizerConfigError, match=next(iter(bad))): HardwareInfo(**bad)
    with pytest.raises(QuantizerConfigError, match='workload must be a WorkloadSpec'): select_kv_cache_config(dict(seq_len=1))
    with pytest.raises(QuantizerConfigError, match='hardware must be a HardwareInfo or None'): select_kv_cache_config(WorkloadSpec(), 32*GiB)

def test_deterministic_and_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for spec in (WorkloadSpec(seq_len=n, head_dim=d) for n in (100, 5000, 50000) for d in (128, 256)):
            for hardware in (unknown, HardwareInfo(GiB), HardwareInfo(64*GiB)):
                a, b = (select_kv_cache_config(spec, hardware) for _ in range(2))
                assert a==b and a.workload is spec and a.hardware is hardware

def test_every_choice_makes_a_cache():
    for hardware,seq_len in ((unknown,100), (unknown,5000), (unknown,32000), (HardwareInfo(1),1)):
        r = pick(hardware, seq_len=seq_len, head_dim=64)
        cache = KVCacheFactory.create(r.config)
        for n in (300, 1): cache.update_and_fetch(*(mx.random.normal((1,2,n,64), key=mx.random.key(i)) for i in (0,1)))
        assert cache.method==r.config.method and 0<cache.nbytes

def test_detection_fails_closed(monkeypatch):
    def broken(): raise RuntimeError('no device')
    for f in (broken, lambda: {}, lambda: dict(memory_size='much'), lambda: dict(memory_size=0, total_memory=0), None):
        monkeypatch.setattr(mx, 'device_info', f)
        assert detect_hardware_info()==unknown
    for key in ('memory_size', 'total_memory'):
        monkeypatch.setattr(mx, 'device_info', lambda key=key: {key: 32*GiB})
        assert detect_hardware_info()==HardwareInfo(32*GiB, mx.get_active_memory())
    monkeypatch.setattr(mx, 'device_info', lambda: dict(memory_size=1))
    assert select_kv_cache_config(WorkloadSpec()).config.method=='gear' # hardware=None detects
    monkeypatch.delattr(mx, 'device_info')
    assert detect_hardware_info()==unknown

def test_config_of():
    c = config_of('kivi', 64, residual_length=64, kivi_group_size=16)
    assert (c.head_dim, c.residual_length, c.kivi_group_size, c.options.kivi_group_size)==(64, 64, 16, 16)
    with pytest.raises(QuantizerConfigError, match='method must be one of'): config_of('zip')

def test_workload_of_a_model():
    from mlx_lm.models import llama
    args = llama.ModelArgs(model_type='llama', hidden_size=64, num_hidden_layers=3, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=96, rms_norm_eps=1e-5, vocab_size=32)
    assert model_workload(llama.Model(args), 500, 2)==WorkloadSpec(128, 500, 3, 2, n_kv_heads=2)

# --- the package's front door

def fresh(code): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()

def test_the_import_is_cheap_and_touches_nothing():
    assert fresh("import veloxquant_mlx, sys; print('mlx.core' in sys.modules, veloxquant_mlx.__version__)").split()[0]=='False'
    names = 'select_kv_cache_config WorkloadSpec HardwareInfo detect_hardware_info KVCacheConfig KVCacheFactory KVCacheBuilder STANDALONE_METHODS describe load_model QuantizerConfigError'.split()
    assert fresh(f'''
import mlx.core as mx
f = mx.fast.scaled_dot_product_attention
import veloxquant_mlx
from veloxquant_mlx import {', '.join(names)}
print(mx.fast.scaled_dot_product_attention is f, set({names!r}) <= set(dir(veloxquant_mlx)))''')=='True True'

def test_unknown_names():
    import veloxquant_mlx
    with pytest.raises(AttributeError, match="module 'veloxquant_mlx' has no attribute 'nothing'"): getattr(veloxquant_mlx, 'nothing')
