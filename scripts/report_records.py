"""The measurements of one machine, as the files under bench/results have them. Imported by report_page.py and report_tables.py."""

import json


class Machine:
    """The measurements of one machine, by kind."""

    def __init__(self, folder):
        self.name = folder.name
        self.folder = folder
        self.about = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        self.simulated = {}
        simulated = folder.parent / "simulated_facts.json"
        if simulated.is_file():
            for row in json.loads(simulated.read_text(encoding="utf-8"))["rows"]:
                self.simulated[row["length"], row["cache"]] = row["right"], row["nll"]
        self.records = {}
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if "kind" in record:
                self.records.setdefault(record["kind"], []).append(record)

    def of(self, kind):
        return self.records.get(kind, [])

    def file(self, name):
        """A file that another program wrote, as it is; {} where there is none."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def results(self, kind, **wanted):
        return [r["result"] for r in self.of(kind) if all(r["result"].get(k) == v for k, v in wanted.items())]
