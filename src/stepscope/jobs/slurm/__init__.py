"""Jobs on a Slurm cluster: submitted through submitit, waited for, and collected into the same results as a local run.

The run directory is the only link between the waiting command and its jobs, so it must be on a shared file system.
Below it, `slurm/N/` holds one submission: the request (`submission.json`), the logs, and one directory per job that
only the job writes to. Only the waiting command writes the run's own results file, from what it finds there. So either
side can die at any moment: a requeued job resumes from its own directory, and a rerun command finds its earlier jobs.
"""
