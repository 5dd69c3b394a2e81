"""`python -m fsm_rollout`: the same as the `fsm-rollout` command."""

from fsm_rollout.cli import main

if __name__ == "__main__":
    main()
