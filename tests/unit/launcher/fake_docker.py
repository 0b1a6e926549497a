"""Stands for `docker` and `docker compose` in tests: containers are lines of a JSON file, and what goes wrong is in
another. Run as `fake_docker.py FOLDER ARGUMENTS`; it knows what `ComposeLauncher` uses, and refuses the rest."""

import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

LABELS = ["label=com.docker.compose.project=mesh", "label=com.docker.compose.service=worker"]


def die(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(1)


class Fake:
    """One call."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "containers.json"
        self.containers: dict[str, dict[str, Any]] = json.loads(self.path.read_text())
        self.faults = json.loads((folder / "faults.json").read_text())
        with (folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(sys.argv[2:]) + "\n")

    def save(self) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(self.containers))
        draft.replace(self.path)

    def run(self, words: list[str]) -> None:
        fault = self.faults.get(words[0] if words[0] != "compose" else "up")
        if fault == "hang":
            time.sleep(600)
        if fault is not None and fault != "half":
            die(fault)
        getattr(self, words[0])(words[1:])
        if fault == "half":
            die("made, but can't be started")

    def ps(self, words: list[str]) -> None:
        filters = [words[index + 1] for index, word in enumerate(words) if word == "--filter"]
        assert filters[:2] == LABELS, filters
        assert {"--all", "--no-trunc"} <= set(words)
        for container_id, item in self.containers.items():
            print(f"{container_id}\t{item['state']}\t{item['status']}")

    def compose(self, words: list[str]) -> None:
        assert words[:2] == ["-p", "mesh"], words
        up = words[words.index("up") :]
        assert {"--detach", "--no-deps", "--no-recreate"} <= set(up)
        service, _, count = up[up.index("--scale") + 1].partition("=")
        assert service == up[-1] == "worker"
        for item in self.containers.values():
            if item["state"] == "exited":
                item |= {"state": "running", "status": "Up 1 second (health: starting)"}
        while len(self.containers) < int(count):
            number = max((int(key[:4]) for key in self.containers), default=0) + 1
            started = {"state": "running", "status": "Up 1 second (health: starting)", "restart": "unless-stopped"}
            self.containers[f"{number:04}" * 16] = started
        self.save()

    def update(self, words: list[str]) -> None:
        self.containers[words[-1]]["restart"] = words[words.index("--restart") + 1]
        self.save()

    def stop(self, words: list[str]) -> None:
        assert words[0] == "--time"
        self.containers[words[2]] |= {"state": "exited", "status": "Exited (0) 1 second ago", "time": words[1]}
        self.save()

    def rm(self, words: list[str]) -> None:
        del self.containers[words[-1]]
        self.save()

    def logs(self, words: list[str]) -> None:
        print(f"the last words of {words[-1][:4]}")


if __name__ == "__main__":
    Fake(Path(sys.argv[1])).run(sys.argv[2:])
