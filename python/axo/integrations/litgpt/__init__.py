"""``axo litgpt``: LitGPT's own commands on a grid."""
