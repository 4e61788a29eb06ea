"""Communication: from a grid to one communicator for each axis, and the collectives of ``axo._C`` on tensors.

connect, c10d                            the two ways in: axo.connect, and torch.distributed's backend "axo"
transports, hosts, rendezvous            what serves a communicator, and how its ranks meet
communicator, work                       the collectives, and a pending one; device: those of GPUs
memory, device_choice                    from what a caller passes to memory, or a device, that the core can use
agree                                    whether all ranks build the same
counting, flight, recording              counts, the flight recorder, communicators without peers (axo dryrun)
extension                                the compiled part, checked against this torch
"""
