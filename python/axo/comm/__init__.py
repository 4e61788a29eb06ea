"""Communication: from a grid to one communicator for each axis, and the collectives of ``axo._C`` on tensors.

connect, c10d                     the two ways in: axo.connect, and torch.distributed's backend "axo"
transports, rendezvous            what serves a communicator, and how its ranks meet
wire, interfaces, secret, hosts   connections between hosts: made, by which network, proved; hosts that are played
communicator, device              the collectives, and those of GPUs; work: a pending one
memory, shared_memory             from what a caller passes to memory that the core can use, and memory that ranks share
device_choice, extension          the device that a rank uses; the compiled part, checked against this torch
counting, flight, recording       who observes: counts and traces; the flight recorder; communicators without peers
agree                             whether all ranks build the same
"""
