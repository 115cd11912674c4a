"""DeepSeek-V2/V3's forward pass written down plainly in float64 numpy, one sequence at a time.

Independent of transformers and of our own code: it follows the authors' description and code. It settles what
transformers leaves out (`norm_topk_prob` of V2, `moe_layer_freq`, YaRN with only one of its two magnitudes).
"""
import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def magnitude(factor, weight):
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(config):
    """Radians per position of each pair, and the magnitude of cosine and sine."""
    dim, base, yarn = config["qk_rope_head_dim"], config["rope_theta"], config.get("rope_scaling")
    plain = base ** -(np.arange(0, dim, 2) / dim)
    if yarn is None:
        return plain, 1.0
    turning = lambda turns: dim * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
    low = max(math.floor(turning(yarn["beta_fast"])), 0)
    high = min(math.ceil(turning(yarn["beta_slow"])), dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    stretched = plain * (1 - slowed) + plain / yarn["factor"] * slowed
    if "attention_factor" in yarn:
        return stretched, yarn["attention_factor"]
    return stretched, magnitude(yarn["factor"], yarn.get("mscale", 1.0)) / magnitude(yarn["factor"], yarn.get("mscale_all_dim", 0.0))


def softmax_scale(config):
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    yarn = config.get("rope_scaling")
    return scale if yarn is None else scale * magnitude(yarn["factor"], yarn.get("mscale_all_dim", 0.0)) ** 2


def rotate(x, config):
    """Turns neighbouring pairs of `[tokens, heads, dim]`."""
    radians, size = frequencies(config)
    angles = np.arange(x.shape[0])[:, None, None] * radians
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = size * (even * np.cos(angles) - odd * np.sin(angles))
    out[..., 1::2] = size * (even * np.sin(angles) + odd * np.cos(angles))
    return out


def attention(x, w, name, config):
    tokens, heads = x.shape[0], config["num_attention_heads"]
    nope, rope, value, rank = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))

    def linear(x, part):
        y = x @ w[f"{name}.{part}.weight"].T
        return y + w[f"{name}.{part}.bias"] if f"{name}.{part}.bias" in w else y

    if config["q_lora_rank"] is None:
        q = linear(x, "q_proj")
    else:
        q = linear(norm(linear(x, "q_a_proj"), w[f"{name}.q_a_layernorm.weight"], 1e-6), "q_b_proj")
    q = q.reshape(tokens, heads, nope + rope)
    q = np.concatenate([q[..., :nope], rotate(q[..., nope:], config)], -1)
    latent = linear(x, "kv_a_proj_with_mqa")
    kv = linear(norm(latent[:, :rank], w[f"{name}.kv_a_layernorm.weight"], 1e-6), "kv_b_proj").reshape(tokens, heads, nope + value)
    k_rope = rotate(latent[:, None, rank:], config)
    k = np.concatenate([kv[..., :nope], np.broadcast_to(k_rope, (tokens, heads, rope))], -1)
    scores = np.einsum("qhd,khd->hqk", q, k) * softmax_scale(config)
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    out = np.einsum("hqk,khd->qhd", softmax(scores), kv[..., nope:])
    return linear(out.reshape(tokens, heads * value), "o_proj")


def mlp(x, w, name):
    inner = silu(x @ w[f"{name}.gate_proj.weight"].T) * (x @ w[f"{name}.up_proj.weight"].T)
    return inner @ w[f"{name}.down_proj.weight"].T


def route(logits, bias, config):
    """Experts and weights of one token, and by how much the worst chosen one, or kept group, beat the next."""
    method, k = config["topk_method"], config["num_experts_per_tok"]
    scores = sigmoid(logits) if method == "noaux_tc" else softmax(logits)
    choice = scores + bias if method == "noaux_tc" else scores
    allowed, margin = np.ones(len(choice), bool), np.inf
    if method != "greedy" and config["n_group"] > 1:
        grouped = np.sort(choice.reshape(config["n_group"], -1), -1)
        group_scores = grouped[:, -2:].sum(-1) if method == "noaux_tc" else grouped[:, -1]
        order = np.argsort(-group_scores, kind="stable")
        if config["topk_group"] < config["n_group"]:
            margin = group_scores[order[config["topk_group"] - 1]] - group_scores[order[config["topk_group"]]]
        allowed = np.repeat(np.isin(np.arange(config["n_group"]), order[: config["topk_group"]]), grouped.shape[1])
    order = [e for e in np.argsort(-choice, kind="stable") if allowed[e]]
    if len(order) > k:
        margin = min(margin, choice[order[k - 1]] - choice[order[k]])
    experts = np.array(order[:k])
    weights = scores[experts]
    if config["norm_topk_prob"]:
        weights = weights / (weights.sum() + 1e-20)
    return experts, weights * config["routed_scaling_factor"], margin


def moe(x, w, name, config):
    """Also returns the experts of each token and the smallest margin."""
    out, chosen, smallest = np.zeros_like(x), [], np.inf
    logits = x @ w[f"{name}.gate.weight"].T
    for t in range(x.shape[0]):
        experts, weights, margin = route(logits[t], w.get(f"{name}.gate.e_score_correction_bias"), config)
        for e, weight in zip(experts, weights):
            out[t] += weight * mlp(x[t], w, f"{name}.experts.{e}")
        chosen.append(experts)
        smallest = min(smallest, margin)
    if config["n_shared_experts"]:
        out += mlp(x, w, f"{name}.shared_experts")
    return out, np.array(chosen), smallest


def is_moe(layer, config):
    return layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0


def forward(token_ids, w, config):
    """`R[0] … R[n], N` as `[tokens, n + 2, hidden]`, the logits, the experts by layer, and the smallest margin."""
    x, eps = w["model.embed_tokens.weight"][token_ids], config["rms_norm_eps"]
    planes, experts, smallest = [], [], np.inf
    for layer in range(config["num_hidden_layers"]):
        planes.append(x)
        name = f"model.layers.{layer}"
        x = x + attention(norm(x, w[f"{name}.input_layernorm.weight"], eps), w, f"{name}.self_attn", config)
        normed = norm(x, w[f"{name}.post_attention_layernorm.weight"], eps)
        if is_moe(layer, config):
            fed, chosen, margin = moe(normed, w, f"{name}.mlp", config)
            experts.append(chosen)
            smallest = min(smallest, margin)
        else:
            fed = mlp(normed, w, f"{name}.mlp")
        x = x + fed
    normed = norm(x, w["model.norm.weight"], eps)
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return np.stack(planes + [x, normed], 1), normed @ head.T, experts, smallest
