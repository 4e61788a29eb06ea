"""Planning: which grid is fastest, how long a step takes, and why. Needs neither torch nor the compiled extension.

    workload = readers.read("gpt-80b")
    request  = planner.Request(workload, machine.load("frontier"), gpus=8192, batch_tokens=2**24)
    best     = planner.plan(request).best

`workload` (layers of a model) and `machine` -> `layer_time` (one layer) -> `model` (one step, closed form), `memory`
-> `planner` (all grids); `schedule` -> `simulator` (one step, event by event); `calibrate`, `reproduce` (the papers'
numbers), `profile` (measure a machine), `report` (tables, plots, one HTML page), `cli`.
"""
