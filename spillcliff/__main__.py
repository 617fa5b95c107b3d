from spillcliff.cli import main

main()
