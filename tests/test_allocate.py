"Bits for layers: exact against brute force, the figures of the theory, and sensitivities on many kinds of models."
import itertools, math
import mlx.core as mx, numpy as np, pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny
import veloxquant_mlx
from veloxquant_mlx import KVCacheBuilder, QuantizerConfigError, allocate_bits, allocate_bits_continuous, calibrate_layer_sensitivities, fit_distortion, layer_schedule, measure_sensitivity
from veloxquant_mlx.config.allocate import Distortion, allocation_cost, compressed_layers
from veloxquant_mlx.config.select import config_of

FOUR, EIGHT = (16, 4, 1, 1), (9, 3, 3, 1, 1, 1, .5, .1)
TEXT = [(7*i*i+3*i)%100 for i in range(128)]

def law(beta): return lambda b: float(beta)**-b

def best(w, total, choices, D):
    "the least cost of all ways"
    ways = np.array([o for o in itertools.product(choices, repeat=len(w)) if sum(o)<=total])
    return (np.array(w)*np.vectorize(D)(ways)).sum(1).min()

# --- the exact problem

@pytest.mark.parametrize('w,total,choices,D,bits,cost', [
    (FOUR, 10, (1,2,3,4), law(4), [4,3,2,1], .4375), (FOUR, 10, (1,2,3,4), law(3.5), [4,3,2,1], .56726), (FOUR, 10, (1,2,3,4), law(5), [3,3,2,2], .24),
    (EIGHT, 20, (1,2,3,4), law(3.5), [4,3,3,3,2,2,2,1], .455893), ([1]*8, 20, (2,3,4), law(3.5), [3]*4+[2]*4, None),
    (FOUR, 10, (1,2,4), law(4), [4,2,2,2], .4375), (FOUR, 10, (1,2,3,4), {1:1.960, 2:.1543, 3:.02813, 4:.006113}, [3,3,2,2], .8712)])
def test_worked_examples(w, total, choices, D, bits, cost):
    assert allocate_bits(w, total/len(w), choices, D)==bits and sum(bits)==total
    D = D.get if isinstance(D, dict) else D
    assert allocation_cost(w, bits, D)==pytest.approx(best(w, total, choices, D), rel=1e-12)
    if cost: assert allocation_cost(w, bits, D)==pytest.approx(cost, abs=5e-5)

@pytest.mark.parametrize('seed', range(12))
def test_nothing_is_better(seed):
    "laws and tables, convex or not, with and without gaps, whole and broken budgets"
    rng = np.random.default_rng(seed)
    w, choices = np.exp(1.5*rng.standard_normal(5)), ((1,2,3,4), (2,3,4), (1,2,4,8), (2,3,5))[seed%4]
    D = dict(zip(choices, rng.random(len(choices)))) if seed%3==0 else {b: float(2+3*rng.random())**-b for b in choices} if seed%3==1 else {b: 3.6**-b for b in choices}
    for avg in (choices[0], choices[0]+.45, np.mean(choices), choices[-1]-.3, choices[-1], 20):
        bits = allocate_bits(w, avg, choices, D)
        assert set(bits)<=set(choices) and sum(bits)<=5*avg+1e-9 and all(type(b) is int for b in bits)
        assert allocation_cost(w, bits, D)==pytest.approx(best(w, 5*avg+1e-9, choices, D.get), rel=1e-12)

@pytest.mark.parametrize('w,beta', [(FOUR, 3.5), (FOUR, 4), (FOUR, 5), (EIGHT, 3.5)])
def test_certificate(w, beta):
    "no bit is worth more in another layer"
    D = law(beta)
    bits = allocate_bits(w, 2.5, (1,2,3,4), beta=beta)
    lost = [x*(D(b-1)-D(b)) for x,b in zip(w, bits) if b>1]
    won = [x*(D(b)-D(b+1)) for x,b in zip(w, bits) if b<4]
    assert min(lost)>=max(won)

def test_continuous():
    c = lambda w, beta: allocate_bits_continuous(w, 2.5, (1,2,3,4), beta=beta)
    assert c(FOUR, 4)==pytest.approx([3.75, 2.75, 1.75, 1.75])
    assert c(FOUR, 3.5)==pytest.approx([3.8832, 2.7766, 1.6701, 1.6701], abs=1e-4)
    assert c(FOUR, 5)==pytest.approx([3.5767, 2.7153, 1.854, 1.854], abs=1e-4)
    assert c(EIGHT, 3.5)==pytest.approx([4, 3.1769, 3.1769, 2.2999, 2.2999, 2.2999, 1.7466, 1], abs=1e-3)
    assert [w*4**-b for w,b in zip(FOUR, c(FOUR, 4))]==pytest.approx([.08839]*4, abs=1e-5)
    assert allocation_cost(FOUR, [2.5]*4, beta=4)==.6875
    assert np.mean(FOUR)/np.prod(FOUR)**.25==pytest.approx(1.94, abs=5e-3)
    measured = Distortion({2:.1543, 3:.02813, 4:.006113}) # its own law, 5.02
    assert allocate_bits_continuous(FOUR, 3, distortion=measured)==pytest.approx(allocate_bits_continuous(FOUR, 3, beta=measured.beta))

def test_the_continuous_solution_is_a_bound():
    rng = np.random.default_rng(1)
    for _ in range(20):
        w = np.exp(rng.standard_normal(9))
        avg = 2+2*rng.random()
        assert allocation_cost(w, allocate_bits_continuous(w, avg, beta=3.6), beta=3.6)<=allocation_cost(w, allocate_bits(w, avg, beta=3.6), beta=3.6)*(1+1e-9)

def test_laws():
    assert Distortion({1:1.960, 2:.1543, 3:.02813, 4:.006113}).beta==pytest.approx(5.02, abs=5e-3)
    assert Distortion({1:.3634, 2:.1175, 3:.03454, 4:.009497}).beta==pytest.approx(3.37, abs=5e-3)

def test_mismatch():
    w = np.exp(1.2*np.random.default_rng(0).standard_normal(12))
    choices, D = (1,2,3,4,6,8), law(3.6)
    cost = lambda bits: allocation_cost(w, bits, D)
    for beta,c in ((3.6,.54182), (5.3,.57190), (2.,.64139)): assert cost(allocate_bits(w, 2.5, choices, beta=beta))==pytest.approx(c, abs=1e-4)
    assert cost([3]*6+[2]*6)==pytest.approx(.93514, abs=1e-4)
    assert cost(allocate_bits(1/w, 2.5, choices, D))==pytest.approx(2.104, abs=5e-4)
    assert cost(allocate_bits_continuous(w, 2.5, choices, beta=3.6))==pytest.approx(.50110, abs=1e-4)

def test_scale_and_budget():
    rng = np.random.default_rng(2)
    w = np.exp(rng.standard_normal(7))
    for choices in ((1,2,3,4), (1,2,4)):
        costs = [allocation_cost(w, allocate_bits(w, n/7, choices)) for n in range(7,29)]
        assert costs==sorted(costs, reverse=True)
        assert all(allocate_bits(w*1000, n/7, choices)==allocate_bits(w, n/7, choices) for n in range(7,29))
    steps = [allocate_bits(w, n/7, (1,2,3,4)) for n in range(7,29)]
    assert all(sum(b)-sum(a)==1 and min(np.subtract(b, a))==0 for a,b in zip(steps, steps[1:]))

def test_the_budget_is_rounded_down():
    assert sum(allocate_bits([1,2,3], 2.66))==7 and sum(allocate_bits([1]*10, 2.7))==27
    assert allocate_bits([3,1], 100)==[4,4]

def test_a_useless_width_is_not_given():
    D = {2:.2, 3:.3, 4:.1}
    assert allocate_bits([5,1], 3, distortion=D)==[4,2]
    assert allocate_bits([1,1,1], 3, (2,3), {2:.1, 3:.1})==[2,2,2]

def test_by_position_as_by_name():
    assert allocate_bits(FOUR, 2.5, (1,2,3,4))==allocate_bits(sensitivities=FOUR, avg_bits=2.5, bit_choices=(1,2,3,4))==allocate_bits(np.array(FOUR), np.float64(2.5), range(1,5))

@pytest.mark.parametrize('f', [allocate_bits, allocate_bits_continuous])
@pytest.mark.parametrize('bad,message', [
    (dict(sensitivities=[1,0]), 'sensitivities must be finite numbers > 0'), (dict(sensitivities=[1,-2]), 'sensitivities'), (dict(sensitivities=[1,math.nan]), 'sensitivities'),
    (dict(sensitivities=[1,math.inf]), 'sensitivities'), (dict(sensitivities=[]), 'sensitivities'), (dict(sensitivities=[[1,2]]), 'sensitivities'), (dict(sensitivities=3), 'sensitivities'),
    (dict(bit_choices=()), 'bit_choices'), (dict(bit_choices=(2,3.)), 'bit_choices'), (dict(bit_choices=(0,4)), 'bit_choices'), (dict(avg_bits=1.99), 'avg_bits must be >= 2, the smallest of bit_choices .got 1.99.'),
    (dict(avg_bits=math.nan), 'avg_bits'), (dict(avg_bits='3'), 'avg_bits'), (dict(beta=1.), 'beta must be > 1'), (dict(distortion={2:.1}), 'distortion must have an error for 3 bits'),
    (dict(distortion=lambda b: math.nan), 'distortion must be finite')])
def test_a_wrong_problem_is_refused(f, bad, message):
    with pytest.raises(QuantizerConfigError, match=message): f(**dict(sensitivities=[1,2], avg_bits=3)|bad)

# --- distortion of the real quantizers

@pytest.mark.parametrize('method', ['kivi', 'turboquant_rvq', 'kvquant', 'gear'])
def test_more_bits_less_error(method):
    d = fit_distortion(method, 64, (1,2,3,4))
    assert d[2]>d[3]>d[4]>0 and 2.5<d.beta<6 and all(type(e) is float for e in d.values())
    assert d==fit_distortion(method, 64, (1,2,3,4)) and d!=fit_distortion(method, 64, (1,2,3,4), seed=1)

def test_a_sample_and_a_function():
    rows = mx.random.normal((300,32), key=mx.random.key(3))*mx.arange(1,33)
    assert fit_distortion('kivi', 32, (2,3), rows)!=fit_distortion('kivi', 32, (2,3))
    assert fit_distortion(lambda x, b: x*(1-.1**b), 32, (1,2), rows)==pytest.approx({1:1e-2, 2:1e-4}, rel=1e-3)
    for bad in (rows[:100], rows[None], rows[:, :16]):
        with pytest.raises(QuantizerConfigError, match='sample must be more than 128 rows of head_dim, 32'): fit_distortion('kivi', 32, (2,3), bad)

def test_a_method_without_widths():
    with pytest.raises(QuantizerConfigError, match='bit_width_inlier must be one of'): fit_distortion('kivi', 64, (2,9))
    with pytest.raises(QuantizerConfigError, match='method must be one of'): fit_distortion('zip', 64, (2,))

# --- sensitivities

@pytest.mark.parametrize('method', ['kivi', 'turboquant_rvq', 'kvquant', 'gear'])
def test_kl_by_hand(method):
    "one layer's cache compressed, the others plain, the second half of the text in calls of 32"
    model, text = tiny('llama_d64'), [(7*i*i+3*i)%100 for i in range(320)] # kvquant looks at 128 tokens before it packs any
    n = len(model.layers)
    def log_probs(layer=None):
        caches = make_prompt_cache(model)
        if layer is not None: caches[layer] = KVCacheBuilder.for_model(model, config_of(method, bit_width_inlier=[2]*n, residual_length=32))[layer]
        model(mx.array([text[:160]]), cache=caches)
        logits = mx.concatenate([model(mx.array([text[i:i+32]]), cache=caches)[0] for i in range(160, 320, 32)])
        return logits-mx.logsumexp(logits, axis=-1, keepdims=True)
    p, D = log_probs(), fit_distortion(method, 64, (2,))[2]
    expected = [(mx.exp(p)*(p-log_probs(i))).sum(-1).mean().item()/D for i in range(n)]
    assert measure_sensitivity(model, text, method=method, progress=False)==pytest.approx(expected, rel=1e-3)

def test_a_layer_that_is_not_heard():
    model = tiny('llama')
    o = model.layers[1].self_attn.o_proj
    o.weight = mx.zeros_like(o.weight)
    for mode in ('kl', 'grad'):
        w = measure_sensitivity(model, TEXT, mode)
        assert w[1]==pytest.approx(1e-6*max(w)) and allocate_bits(w, 3)[1]==2
    assert measure_sensitivity(model, TEXT, 'norm')[1]>1e-3

@pytest.mark.parametrize('mode', ['kl', 'grad', 'norm'])
@pytest.mark.parametrize('name,layers', [('llama', [True]*3), ('llama_sliding', None), ('deepseek_v3', [True]*3), ('falcon_h1', [True]*3), ('qwen3_next', None), ('qwen3_vl', [True]*3)])
def test_kinds_of_models(name, layers, mode):
    "one number for every layer with attention; what keeps the model's own cache is at the floor"
    model = tiny(name)
    found = compressed_layers(model, 'turboquant_rvq')
    assert layers is None or list(found.values())==layers
    w = measure_sensitivity(model, TEXT, mode, method='turboquant_rvq', progress=False)
    assert len(w)==len(found) and min(w)>0
    for x,yes in zip(w, found.values()): assert (x>1e-6*max(w)*1.01)==yes
    KVCacheBuilder.for_model(model, config_of('turboquant_rvq', bit_width_inlier=allocate_bits(w, 3)))

def test_refused_texts_and_models():
    model = tiny('llama')
    for kw,message in ((dict(mode='hessian'), "mode must be one of kl, grad, norm .got 'hessian'."), (dict(text='words'), 'text must be token ids'), (dict(text=[1]), 'text must be token ids'),
        (dict(text=TEXT[:30]), 'text must be long enough'), (dict(b0=9), 'bit_width_inlier must be one of'), (dict(method='zip'), 'method must be one of')):
        with pytest.raises(QuantizerConfigError, match=message): measure_sensitivity(model, **dict(text=TEXT, progress=False)|kw)
    with pytest.raises(QuantizerConfigError, match='model must have a layer whose cache kivi can compress'): measure_sensitivity(tiny('mamba'), TEXT)

def test_the_model_is_left_as_it_was():
    model = tiny('llama')
    before = model(mx.array([TEXT]))
    for mode in ('kl', 'grad', 'norm'): measure_sensitivity(model, TEXT, mode)
    assert mx.array_equal(model(mx.array([TEXT])), before)

class Letters:
    def encode(self, text): return [ord(c)%100 for c in text]

def test_calibration_is_a_mean_over_texts():
    model, texts = tiny('llama'), ['a red wheel barrow '*9, 'glazed with rain water '*9]
    one = [measure_sensitivity(model, Letters().encode(t)[:130]) for t in texts]
    assert calibrate_layer_sensitivities(model, Letters(), texts, 130)==pytest.approx(np.mean(one, axis=0).tolist())
    for bad in ('text', []):
        with pytest.raises(QuantizerConfigError, match='prompts must be a list of texts'): calibrate_layer_sensitivities(model, Letters(), bad)
    for bad in (1, 2.5):
        with pytest.raises(QuantizerConfigError, match='seq_len must be'): calibrate_layer_sensitivities(model, Letters(), seq_len=bad)

def test_schedule():
    model = tiny('llama_sliding')
    s = layer_schedule(model, Letters(), 3, (2,3,4), 'kvquant', prompts=['glazed with rain water '*9], progress=False)
    used = [i for i,yes in enumerate(s.layers.values()) if yes]
    assert len(s.bits)==3 and 0<len(used)<3 and s.average<=3 and all(s.bits[i]==2 for i in range(3) if i not in used)
    assert s.cost()==pytest.approx(sum(s.sensitivities[i]*s.distortion[s.bits[i]] for i in used)) and s.cost()<=s.cost(3)<s.cost(2)
    caches = KVCacheBuilder.for_model(model, config_of('kvquant', bit_width_inlier=s.bits))
    assert [caches[i].config.kvquant_bits for i in used]==[s.bits[i] for i in used]

def test_front_door():
    for name in ('allocate_bits', 'allocate_bits_continuous', 'calibrate_layer_sensitivities', 'fit_distortion', 'layer_schedule', 'measure_sensitivity'): assert name in veloxquant_mlx.__all__
