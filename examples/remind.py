"""A program with a side effect: `fencepost work --kind reminder -- python3 remind.py`."""

import json
import subprocess
import sys

order = json.load(sys.stdin)
mail = {"text": f"Dear {order['customer']}, have you forgotten us?"}
sent = subprocess.run(
    ["fencepost", "effect", "send-reminder", "--using", "mail"],
    input=json.dumps(mail),
    stdout=subprocess.PIPE,
    text=True,
    check=False,
)
if sent.returncode:
    sys.exit(sent.returncode)  # 75 among them: the task is given back until a person has decided
print(sent.stdout)
