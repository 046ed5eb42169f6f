"""`top` and `explain` of a running controller: jobs beside flows, by name."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts import Controller, Host


def test_top_and_explain_show_jobs_and_flows_of_a_running_controller(
    hosts: tuple[Host, Host], send: Callable[..., None], tmp_path: Path
) -> None:
    controller = Controller(tmp_path / "run")
    left, right = hosts
    config = tmp_path / "stellar.toml"
    # A forwarder's packets have their class by DSCP, unless it is asked for the job's.
    config.write_text(f'[[interface]]\nname = "{left.target}"\nclassify = "job"\nrate = "1gbit"\n')
    try:
        controller.start(extra=("--config", str(config)))
        controller.run("job", "set", "train", "--match", "qpn=17")
        # The first packets of a flow are left as they are, until its job is found: how soon that is
        # depends on the machine, and so in how many windows the job's packets come.
        for number in range(20):
            send(left, right, 40 * number, 40, qpn=17)
            time.sleep(0.4)
            seen = controller.json("job", "show", "train")["job"]
            if number and seen["flows"]:
                break
        send(left, right, 40 * number + 40, 40, qpn=17)
        time.sleep(0.4)
        lines = controller.run("top", "--json", "--count", "2", "--interval", "0.2").stdout
        for line in lines.splitlines():
            document = json.loads(line)
            (row,) = document["jobs"]
            assert (row["job"], row["policy"]) == ("train", "laxity")
            assert row["iteration"] >= 1
            assert row["is_periodic"] is False and row["laxity_ms"] is None
        assert len(lines.splitlines()) == 2
        shown = controller.run("top", "--count", "1", "--interval", "0.1").stdout
        assert "1 job, 0 in the sync window; policy laxity" in shown
        assert "irregular" in shown and "flows active" in shown

        job = controller.run("explain", "train").stdout
        assert job.startswith("Job train: qpn 17")
        assert "Not periodic: " in job and "Its ranks do not report" in job
        (flow,) = {row["flow"] for row in controller.json("flows")["flows"]}
        assert controller.run("explain", flow).stdout.startswith(f"Flow {flow}")
        neither = controller.run("explain", "tran", check=False)
        assert neither.returncode == 2
        assert "  train" in neither.stderr and flow in neither.stderr

        status = controller.run("status").stdout
        assert re.search(r"policy laxity, iteration events [1-9]\d*,", status)
        assert "laxity: not periodic: " in status
    finally:
        controller.close()
