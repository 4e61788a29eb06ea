"""Planning: which grid is fastest, how long a step takes, and why. Needs neither torch nor the compiled extension.

    workload = readers.read("gpt-80b")
    request  = planner.Request(workload, machine.load("frontier"), gpus=8192, batch_tokens=2**24)
    best     = planner.plan(request).best

`workload` (layers of a model) and `machine` -> `layer_time` (one layer) -> `model` (one step, closed form), `memory`
-> `planner` (all grids); `step_operations` -> `simulator` (one step, event by event); `profile` (measure a machine),
`output` and `plots` (tables, JSON, CSV, one HTML page). The papers' numbers beside these are in ``bench/papers``.
"""
