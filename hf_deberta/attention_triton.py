"""draft"""
import os
import torch
from .attention_triton_forward import far_products_kernel, forward_kernel
import triton

def tables(position_key, position_query, rows_of_distance, first_row, near, tile):
    k = (rows_of_distance.shape[0] - 1) // 2
    width = (near + 1) * tile
    x = torch.arange(-width, width, device=rows_of_distance.device)
    t = position_key if position_key is not None else position_query
    rows = (rows_of_distance[x.clamp(-k, k) + k] - first_row).clamp(0, t.shape[1] - 1)
    return tuple(None if t is None else t[:, rows] for t in (position_key, position_query))

def laid(t): return t.transpose(1, 2).contiguous()

def forward(query, key, value, key_table, query_table, mask, ends, documents, first_block, bounds, seed, scale, dropout_p, causal, near, tile, precision="ieee"):
    B, H, N, d = query.shape
    q, k, v = map(laid, (query, key, value))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((B, H, N), float("nan"), device=q.device)
    D = triton.next_power_of_2(max(d, 16))
    blocks = triton.cdiv(N, tile)
    far = blocks - 1 > near and (key_table is not None or query_table is not None)
    far_q = far_k = lse
    if far:
        far_q, far_k = (torch.full((2, B, H, N), float("nan"), device=q.device) for _ in range(2))
        for st, ta, o in ((q, key_table, far_q), (k, query_table, far_k)):
            if ta is not None:
                far_products_kernel[(blocks, H, B)](st, ta, o, N, H, ta.shape[1], d, T=tile, D=D)
    programs = B * blocks if bounds is None else documents.shape[0]
    M = "none" if mask is None else "tokens" if mask.dim() == 2 else "pairs"
    kt = key_table if key_table is not None else q
    qt = query_table if query_table is not None else q
    forward_kernel[(programs, H)](q, k, v, kt, qt, far_q, far_k, mask if mask is not None else q, ends if ends is not None else q,
       documents if documents is not None else q, first_block if documents is not None else q, bounds if bounds is not None else q,
       seed if seed is not None else q, out, lse, B, H, N, d, blocks, near, scale * 1.4426950408889634, dropout_p,
       C2P=key_table is not None, P2C=query_table is not None, FAR=far, MASK=M, CAUSAL=causal, PACKED=bounds is not None,
       DROPOUT=dropout_p > 0, PRECISION=precision, T=tile, D=D)
    return out.transpose(1, 2), lse
