"""`python -m barellm` is the same as `barellm`."""

from barellm.cli.main import main

raise SystemExit(main())
