"""Jobs on a Slurm cluster: submitted through submitit, waited for, and collected into the same results as a local run.

The run's folder is the only link between the waiting command and its jobs, so it has to be on a file system that both
see. Below it, `slurm/N/` holds one submission: what was submitted (`submission.json`), the logs, and a folder for each
job that the job alone writes to. The waiting command alone writes the run's own results file, from what it finds there.
So either side can die at any moment: a job that is queued again goes on from its own folder, and a command that is
typed again finds its jobs of before.
"""
