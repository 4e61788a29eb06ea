"""Planning: which grid is fastest, how long a step takes, and why. Needs neither torch nor the compiled extension.

    workload = readers.read("gpt-80b")
    request  = planner.Request(workload, machine.load("frontier"), gpus=8192, batch_tokens=2**24)
    best     = planner.plan(request).best

    what is asked     readers, workload (the blocks of a model), layers (what each kind answers), machine, run_options,
                      request; profile measures a machine
    one step          layer_time (seconds of a layer and a block), model (a step by closed form), memory, flops
    with stages       cut (where), pipeline_schedule (who runs what when), stages (one step)
    all grids         planner, grid_choice (``--grid auto``), command (a row's command)
    against the clock clock, replay (of one grid's step, as ``axo.dryrun`` records it)
    what is printed   output, plots, chrome_trace

The papers' numbers beside these are in ``bench/papers``.
"""
