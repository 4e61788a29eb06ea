"""Communication: from a grid to one communicator for each axis, and the collectives of ``axo._C`` on tensors."""
