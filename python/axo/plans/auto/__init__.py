"""The plan for any module: what is not understood is kept whole and named.

plan           replaces the layers: asks the others, in this order
patterns       what the user says of single layers
families       tables of attention: Hugging Face's plans, classes, forms
attention      splits attention by heads, as its table says
regions        which activations may stay split between other layers, by tracing
decide         which layer is normal, which transposed, which stays whole
experts        mixtures of experts that are modules: all ranks call them all
stacked_experts    those whose weights lie in one tensor
agreement      what ranks with other rows must have alike, compared in steps
"""
