"""The plan for any module: what may stay split is proved, what cannot is kept whole and named.

plan           replaces the layers: asks the others, in this order
patterns       what the user says of single layers
hugging_face   attention that is known by class
by_heads       attention of any class: the proof (``heads_interpreter``), and the code that runs then (``heads_code``)
regions        which activations may stay split, by tracing
alike          what ranks with other rows must have alike, compared in steps
decide         which layer is normal, which transposed, which stays whole
"""
