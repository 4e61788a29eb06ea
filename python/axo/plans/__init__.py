"""Plans: which parallel layer stands for which module of a known model.

litgpt/, auto/      the plans: for LitGPT's models, and for any module
replace, report     how a layer is put in, and the account of what became of each
context, experts    models whose sequences, or experts, lie on several ranks
head_loss           transformers' loss, of logits that never exist whole
heads, gradient     attention heads over x; whole tensors whose gradients are partial sums
"""
