"""Ring 2: source x mixer x follower -> the loss of one training step.

`mixer` says how a batch's MixPlan is drawn; `step` holds the module Supervision: draw the plan, run the network on the
mixed input while the shares follow it, turn outputs and targets into a loss. The trainer calls nothing else.
"""
