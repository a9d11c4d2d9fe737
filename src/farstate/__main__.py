from farstate.cli import main

main()
