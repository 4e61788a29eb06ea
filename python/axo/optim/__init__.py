"""What belongs to the update of parameters: ZeRO's cut, clipping, the scaler, and checks of optimizers.

    zero          optimizer state and gradients cut over the data axis
    clip          the norm of all gradients over all ranks
    scaler        torch's GradScaler, whose overflow flag is that of any rank
    checks        optimizers, and states of them, that cannot be right on shards
    update_trial  whether an optimizer updates a part of a tensor as it would in the whole
    step_hooks    what runs around each step of every optimizer

Not here: how gradients get to ``.grad`` (``axo.overlap``).
"""
