"Small random float32 models of mlx-lm's own classes: `tiny(name)` for every name in `NAMES`."
import importlib
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

# Fields that most modules share; `from_dict` drops what a module does not know.
# 4 query heads on 2 KV heads of 16; windows of 8 are far shorter than the prompts of the tests.
COMMON = dict(vocab_size=100, hidden_size=64, num_hidden_layers=3, intermediate_size=64, moe_intermediate_size=32,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=4096,
    attention_bias=False, mlp_bias=False, tie_word_embeddings=False, sliding_window=8,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, num_shared_experts=1,
    routed_scaling_factor=1., norm_topk_prob=True, first_k_dense_replace=1, n_group=1, topk_group=1)

def mix(*parts, **kw):
    "One dict of all, later ones win"
    out = {}
    for o in parts: out |= o
    return out | kw

def text(*parts, **kw):
    "The configuration of a wrapper that holds a text model"
    return dict(text_config=mix(COMMON, *parts, **kw))

S,F = 'sliding_attention','full_attention'
HEAD = dict(head_dim=16)
MLA = dict(num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
YARN = dict(type='yarn', factor=40., beta_fast=32, beta_slow=1, mscale=1., mscale_all_dim=1., original_max_position_embeddings=4096)
MAMBA = dict(mamba_d_conv=4, mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_proj_bias=False, mamba_conv_bias=True, mamba_expand=2)
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=3)
KDA = dict(num_heads=4, head_dim=16, kda_layers=[1,3], short_conv_kernel_size=3)
GRANITE = dict(logits_scaling=1., attention_multiplier=.25, embedding_multiplier=1., residual_multiplier=1.)
LFM2 = dict(num_hidden_layers=4, norm_eps=1e-5, conv_bias=False, conv_L_cache=3, full_attn_idxs=[1,3], block_dim=64, block_ff_dim=64,
    block_multiple_of=4, block_ffn_dim_multiplier=1., block_auto_adjust_ff_dim=False, num_dense_layers=1, use_expert_bias=True)
QWEN_MOE = mix(HEAD, decoder_sparse_step=1, mlp_only_layers=[], shared_expert_intermediate_size=32)
QWEN_NEXT = mix(QWEN_MOE, DELTA, num_hidden_layers=4, full_attention_interval=2, partial_rotary_factor=.5)
BAILING = dict(num_hidden_layers=4, layer_group_size=2, group_norm_size=2, head_dim=16, n_group=2)
MIMO_V2 = dict(num_hidden_layers=4, hybrid_layer_pattern=[0,1,0,1], moe_layer_freq=[0,1,0,1], add_swa_attention_sink_bias=True,
    add_full_attention_sink_bias=True, sliding_window_size=8, topk_method='noaux_tc', scoring_func='sigmoid', layernorm_epsilon=1e-5,
    swa_rope_theta=1e3, swa_num_attention_heads=4, swa_num_key_value_heads=2, head_dim=24, v_head_dim=16, swa_head_dim=24, swa_v_head_dim=16,
    partial_rotary_factor=.5)

CONFIGS = {
    'llama': {}, 'llama_d32': dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_hidden_layers=1),
    'llama_d64': dict(head_dim=64), 'llama_d80': dict(head_dim=80), 'llama_d256': dict(head_dim=256, num_hidden_layers=2),
    'llama_sliding': dict(layer_types=[F,S,F]), 'llama_rope3': dict(rope_scaling=dict(rope_type='llama3', factor=8., low_freq_factor=1.,
        high_freq_factor=4., original_max_position_embeddings=64)),
    'Klear': dict(decoder_sparse_step=1, mlp_only_layers=[0]),
    'afm7': dict(hidden_dim=64, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
    'afmoe': mix(HEAD, layer_types=[F,S,F], num_dense_layers=1),
    'apertus': dict(post_norm=True, qk_norm=True),
    'baichuan_m1': dict(num_hidden_layers=4, sliding_window_layers=[0,2], conv_window=2),
    'bailing_hybrid': mix(BAILING, MLA, num_experts=8, layer_group_size=2),
    'bailing_moe': {}, 'bailing_moe_linear': mix(BAILING),
    'bailing_moe_v3': mix(BAILING, MLA, num_experts=8, topk_group=1, kda_lower_bound=-5., short_conv_kernel_size=3, moe_shared_expert_intermediate_size=32),
    'cohere': {}, 'cohere2': mix(HEAD, num_hidden_layers=4, sliding_window_pattern=2),
    'dbrx': dict(d_model=64, n_layers=3, n_heads=4, ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
        attn_config=dict(kv_n_heads=2, clip_qkv=8., rope_theta=1e4)),
    'deepseek': {}, 'deepseek_v2': mix(MLA, rope_scaling=YARN), 'deepseek_v3': mix(MLA, rope_scaling=YARN),
    'deepseek_v32': mix(MLA, index_head_dim=16, index_n_heads=2, index_topk=8),
    'deepseek_v41': mix(HEAD, q_lora_rank=16, qk_rope_head_dim=8, o_groups=2, o_lora_rank=8, compress_ratios=(1,4,1), hc_mult=2),
    'dots1': HEAD, 'ernie4_5': mix(HEAD, use_bias=False), 'ernie4_5_moe': dict(use_bias=False, moe_num_experts=4, moe_intermediate_size=32, moe_k=2),
    'exaone': dict(num_layers=3, layer_norm_epsilon=1e-5),
    'exaone4': mix(HEAD, num_hidden_layers=4, rope_scaling=None, sliding_window_pattern='LLGL'),
    'exaone_moe': mix(HEAD, layer_types=[S,F,F], is_moe_layer=[False,True,True]),
    'falcon_h1': mix(MAMBA, HEAD, mamba_d_ssm=64),
    'gear': mix(HEAD, layer_types=[S,F,F]), 'gear_softcap': mix(HEAD, layer_types=[S,F,F], attn_logit_softcapping=20.),
    'gemma': HEAD, 'gemma2': HEAD,
    'gemma3_text': mix(HEAD, num_hidden_layers=4, sliding_window_pattern=2, query_pre_attn_scalar=16),
    'gemma3': text(HEAD, model_type='gemma3_text', sliding_window_pattern=3, query_pre_attn_scalar=16),
    'gemma3n': text(HEAD, model_type='gemma3n', num_hidden_layers=5, layer_types=[S,F,S,F,S], num_kv_shared_layers=2, vocab_size_per_layer_input=100, rope_local_base_freq=1e3,
        final_logit_softcapping=30., activation_sparsity_pattern=[.5,0.,0.,0.,0.], hidden_size_per_layer_input=16, altup_num_inputs=2,
        altup_coef_clip=1., altup_correct_scale=True, altup_active_idx=0, laurel_rank=8),
    'gemma4_text': mix(HEAD, num_hidden_layers=6, global_head_dim=32, vocab_size_per_layer_input=100, num_kv_shared_layers=2, hidden_size_per_layer_input=16,
        sliding_window_pattern=2, layer_types=[S,F]*3),
    'gemma4': text(HEAD, model_type='gemma4_text', num_hidden_layers=6, global_head_dim=32, vocab_size_per_layer_input=100, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, layer_types=[S,F]*3),
    'glm': HEAD, 'glm4': mix(HEAD, partial_rotary_factor=.5), 'glm4_moe': mix(HEAD, rope_scaling=None, use_qk_norm=True, partial_rotary_factor=.5),
    'glm4_moe_lite': MLA,
    'glm_moe_dsa': mix(MLA, index_head_dim=16, index_n_heads=2, index_topk=8, topk_method='noaux_tc', scoring_func='sigmoid', moe_layer_freq=1,
        rope_parameters=dict(rope_theta=1e4, rope_type='default')),
    'gpt2': dict(n_ctx=4096, n_embd=64, n_head=4, n_layer=3, n_positions=4096, layer_norm_epsilon=1e-5),
    'gpt_bigcode': dict(n_embd=64, n_layer=3, n_inner=64, n_head=4, n_positions=4096, layer_norm_epsilon=1e-5),
    'gpt_neox': dict(layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=.5),
    'gpt_oss': mix(HEAD, num_hidden_layers=4, layer_types=[S,F,S,F]),
    'gptj': dict(n_embd=64, n_head=4, n_layer=3, rotary_dim=8, n_positions=4096),
    'granite': GRANITE, 'granitemoe': GRANITE,
    'granitemoehybrid': mix(GRANITE, MAMBA, num_hidden_layers=4, layer_types=['mamba','attention']*2, shared_intermediate_size=32),
    'helium': HEAD,
    'hunyuan': dict(rope_scaling=dict(type='dynamic', alpha=1000., factor=1.), moe_topk=2, num_shared_expert=1, use_mixed_mlp_moe=True, use_qk_norm=True, use_cla=True, cla_share_factor=2, num_hidden_layers=4),
    'hunyuan_v1_dense': dict(rope_scaling=dict(type='dynamic', alpha=1000., factor=1., beta_fast=32, beta_slow=1, mscale=1., mscale_all_dim=0.)),
    'internlm2': {}, 'internlm3': {}, 'iquestloopcoder': mix(HEAD, loop_num=2, loop_window_size=8),
    'jamba': mix(MAMBA, num_hidden_layers=4, attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2),
    'kimi_k25': text(MLA),
    'kimi_k3': text(MLA, model_type='kimi_linear', num_hidden_layers=4, linear_attn_config=KDA, num_experts_per_token=2),
    'kimi_linear': mix(MLA, HEAD, num_hidden_layers=4, linear_attn_config=KDA,
        model_max_length=4096),
    'kimi_vl': text(MLA),
    'laguna': mix(HEAD, num_hidden_layers=4, layer_types=[S,F]*2),
    'lfm2': LFM2, 'lfm2-vl': text(LFM2, model_type='lfm2'), 'lfm2_moe': LFM2,
    'lille-130m': dict(block_size=4096, layer_norm_eps=1e-5, n_embd=64, n_head=4, n_kv_heads=2, n_layer=3),
    'llama4': text(HEAD, model_type='llama4', num_hidden_layers=4, num_experts_per_tok=1, attention_chunk_size=8, interleave_moe_layer_step=2, intermediate_size_mlp=64, rope_scaling=None, use_qk_norm=True),
    'llama4_text': mix(HEAD, num_hidden_layers=4, intermediate_size_mlp=64, no_rope_layers=[1,1,0,1], use_qk_norm=True),
    'longcat_flash': mix(MLA, attention_method='MLA', zero_expert_type='identity', ffn_hidden_size=64, moe_topk=2, expert_ffn_hidden_size=32,
        zero_expert_num=1, num_layers=2, mla_scale_q_lora=True, mla_scale_kv_lora=True),
    'longcat_flash_ngram': mix(MLA, ffn_hidden_size=64, moe_topk=2, expert_ffn_hidden_size=32, zero_expert_num=1, num_layers=2, mla_scale_q_lora=True,
        mla_scale_kv_lora=True, ngram_vocab_size_ratio=2),
    'mamba': dict(state_size=8, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4),
    'mamba2': mix(HEAD, num_heads=4, state_size=8, layer_norm_epsilon=1e-5, conv_kernel=4, n_groups=1, use_bias=False, use_conv_bias=True,
        time_step_limit=(.001, 100.), time_step_rank='auto'),
    'mellum': mix(HEAD, layer_types=[S,F,F], rope_parameters={o: dict(rope_theta=1e4, rope_type='default') for o in (S,F)}),
    'mimo': dict(num_nextn_predict_layers=0),
    'mimo_v2_dense': MIMO_V2 | dict(moe_layer_freq=[0]*4), 'mimo_v2_flash': MIMO_V2,
    'minicpm': dict(dim_model_base=64, scale_depth=1.4, scale_emb=1.),
    'minicpm3': mix(MLA, dim_model_base=64, scale_depth=1.4, scale_emb=1., rope_scaling=dict(long_factor=[1.]*4, short_factor=[1.]*4,
        original_max_position_embeddings=4096)),
    'minimax': mix(HEAD, shared_intermediate_size=32, rotary_dim=8),
    'minimax_m3_vl': text(HEAD, layer_types=[F,'sparse',F], index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
        dense_intermediate_size=32, shared_intermediate_size=32),
    'ministral3': mix(HEAD, layer_types=[S,F,F], rope_parameters=dict(rope_theta=1e4, rope_type='default', llama_4_scaling_beta=.1,
        original_max_position_embeddings=4096)),
    'mistral3': text(model_type='llama'),
    'mistral4': mix(MLA, rope_parameters=dict(rope_theta=1e4, rope_type='default', llama_4_scaling_beta=.1, original_max_position_embeddings=4096)),
    'mixtral': {}, 'muse_glimmer': mix(HEAD, num_hidden_layers=4, layer_types=[S,F]*2),
   
    'nanbeige': HEAD, 'nanochat': dict(num_key_value_heads=4),
    'nemotron': dict(hidden_act='relu2', norm_eps=1e-5),
    'nemotron-nas': dict(num_hidden_layers=4, block_configs=[dict(attention=dict(n_heads_in_group=2), ffn=dict(ffn_mult=1.))]*2
        + [dict(attention=dict(no_op=True), ffn=dict(ffn_mult=1.)), dict(attention=dict(n_heads_in_group=4), ffn=dict(no_op=True))]),
    'nemotron_h': mix(HEAD, num_hidden_layers=4, mamba_num_heads=4, mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=8, conv_kernel=4, n_groups=1,
        layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True, hybrid_override_pattern=['*','M','*','-'], time_step_limit=(.001, 100.)),
    'olmo2': HEAD, 'olmo3': mix(HEAD, num_hidden_layers=4, layer_types=[S,F]*2),
    'olmo_hybrid': mix(HEAD, DELTA, num_hidden_layers=4, linear_allow_neg_eigval=False, layer_types=['linear_attention',F]*2),
    'olmoe': {},
    'openelm': mix(HEAD, num_transformer_layers=3, model_dim=64, ffn_dim_divisor=16, num_query_heads=[4,4,4], num_kv_heads=[2,2,2], ffn_multipliers=[1.,1.,1.]),
    'phi': dict(layer_norm_eps=1e-5), 'phi3': {},
    'phimoe': dict(rope_scaling=dict(type='longrope', long_factor=[1.]*8, short_factor=[1.]*8, long_mscale=1.2, short_mscale=1.2, original_max_position_embeddings=4096)),
    'phixtral': dict(num_vocab=100, model_dim=64, num_heads=4, num_layers=3, rotary_dim=8),
    'pixtral': text(model_type='llama'),
    'plamo': dict(n_shared_head=2),
    'plamo2': dict(num_hidden_layers=4, hidden_size_per_head=16, attention_window_size=4096, full_attention_idx=[1,3], mamba_d_state=8, mamba_num_heads=4),
    'plamo3': mix(HEAD, num_hidden_layers=4, window_size=8, sliding_window_pattern=2),
    'qwen': dict(kv_channels=16), 'qwen2': {}, 'qwen2_moe': QWEN_MOE, 'qwen2_vl': text(model_type='qwen2'),
    'qwen3': HEAD, 'qwen3_moe': QWEN_MOE, 'qwen3_next': QWEN_NEXT, 'qwen3_5': text(QWEN_NEXT, model_type='qwen3_5', num_experts=0),
    'qwen3_5_moe': text(QWEN_NEXT, model_type='qwen3_5_moe'), 'qwen3_vl': text(HEAD, model_type='qwen3'), 'qwen3_vl_moe': text(QWEN_MOE, model_type='qwen3_moe'),
    'recurrent_gemma': dict(conv1d_width=3, logits_soft_cap=30., attention_window_size=8, block_types=['recurrent','recurrent','attention']),
    'rwkv7': mix(HEAD, norm_eps=1e-5, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8),
    'seed_oss': HEAD, 'smollm3': dict(no_rope_layer_interval=2), 'solar_open': mix(HEAD, partial_rotary_factor=1.),
    'spark2_5': mix(HEAD, layer_types=[S,F,F], rope_parameters={o: dict(rope_theta=1e4, rope_type='default') for o in (S,F)}),
    'stablelm': dict(use_qkv_bias=False, partial_rotary_factor=.5, layer_norm_eps=1e-5),
    'starcoder2': {}, 'step3p5': mix(HEAD, num_attention_groups=2, layer_types=[F,S,F], moe_num_experts=4, moe_top_k=2, share_expert_dim=32, moe_layers_enum='1,2',
        attention_other_setting=dict(num_attention_heads=4, num_attention_groups=2, head_dim=16)),
    'talkie': HEAD, 'telechat3': HEAD, 'youtu_llm': MLA,
}
NAMES = sorted(CONFIGS)

# Not here: bitnet, muse_spark (their kernels need Metal), olmo (needs ai2-olmo), prism_hadamard_qwen35 (2-bit packed weights only),
# phi3small (stock mlx-lm corrupts the heap on CPU with short prompts).

MODULES = {o: o.split('_')[0] for o in ('llama_d32', 'llama_d64', 'llama_d80', 'llama_d256', 'llama_sliding', 'llama_rope3', 'gear_softcap')} | {'mimo_v2_dense': 'mimo_v2_flash'}

# What each model does with the keys and values of its `KVCache` entries; every other name hands them to attention as they are.
NO_KV = {'deepseek_v41', 'mamba', 'mamba2', 'recurrent_gemma', 'rwkv7'}                  # no `KVCache` entry at all
BY_HAND = {'gemma2', 'gear_softcap', 'plamo', 'stablelm'}                               # own attention, or arrays derived from K and V
MLA_NAMES = {'bailing_hybrid', 'bailing_moe_v3', 'deepseek_v3', 'glm4_moe_lite', 'kimi_k25', 'kimi_k3', 'kimi_linear', 'kimi_vl',
    'longcat_flash', 'longcat_flash_ngram', 'mistral4'}                                 # latent attention: scores are added outside
SPARSE = {'deepseek_v32', 'glm_moe_dsa', 'minimax_m3_vl'}                               # read and write attributes of their caches

def module_name(name): return MODULES.get(name, name)

def _redraw(path, x):
    "N(0, 1/fan_in) matrices, vectors near what they were, sink logits of size 1: every layer and every token matters"
    if not mx.issubdtype(x.dtype, mx.floating): return x
    if x.ndim<2: return x.astype(mx.float32) + mx.random.normal(x.shape)*(1. if 'sink' in path else .1)
    if 'embed' in path or 'wte' in path: std = .3
    else: std = (x[0].size if 'conv' in path else x.shape[-1])**-.5
    return mx.random.normal(x.shape)*std

def tiny(name:str, # one of `NAMES`
    seed:int=0 # of all weights
):
    "A random float32 model of mlx-lm's class for `name`"
    mx.random.seed(seed)
    mod = importlib.import_module(f'mlx_lm.models.{module_name(name)}')
    model = mod.Model(mod.ModelArgs.from_dict(mix(COMMON, CONFIGS[name], model_type=module_name(name))))
    model.update(tree_unflatten([(k, _redraw(k, v)) for k,v in tree_flatten(model.parameters())]))
    mx.eval(model.parameters())
    return model.eval()
