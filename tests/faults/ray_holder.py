"""A Ray cluster that outlives the controllers that join it: ``python ray_holder.py CPUS``.

Prints its address, then answers each line on its standard input with one line of JSON: the CPUs
that are free and the placement groups that are there. Ends, and its Ray with it, when the input
does.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import ray
    from ray.util import placement_group_table

    ray.init(
        address="local",
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=256 << 20,
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    for _ in sys.stdin:
        groups = placement_group_table().values()
        placements = [group["state"] for group in groups if group["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU", 0.0)
        print(json.dumps({"free": free, "places": placements}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
