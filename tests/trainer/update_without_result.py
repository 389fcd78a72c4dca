"""A program: asynchronous training in which one update is counted although its worker never says that it is done.

So it is if a worker dies after its update. Writes each step with the optimizer's count in its snapshot, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tensorflow as tf

from testkit.ports import free_ports
from testkit.training_harness import Noisy
from understudy.trainer import TrainSettings
from understudy.trainer.parameter_server.parameter_server_job import ParameterServerJob


def main() -> None:
    hosts = {role: [f"localhost:{port}"] for role, port in zip(("worker", "ps"), free_ports(2), strict=True)}
    servers = [tf.distribute.Server(hosts, job_name=role, task_index=0, protocol="grpc") for role in hosts]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(hosts), rpc_layer="grpc")
    settings = TrainSettings(
        run_dir=Path(sys.argv[1]), steps=15, checkpoint_every=5, steps_per_call=5, strategy="parameter_server"
    )
    job = ParameterServerJob(Noisy(), settings, tf.distribute.ParameterServerStrategy(resolver))
    optimizer = job._model.optimizer
    place = [variable is optimizer.iterations for variable in optimizer.variables].index(True)
    counted = []
    for event in job.run(0):
        counted.append((event.step, int(job.capture(event.step).optimizer[place])))
        if len(counted) == 1:
            optimizer.iterations.assign_add(1)
    sys.stdout.write(f"{json.dumps(counted)}\n")
    sys.stdout.flush()
    del servers
    os._exit(0)  # the servers of a cluster cannot be stopped


if __name__ == "__main__":
    main()
