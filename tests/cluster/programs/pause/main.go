package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		for {
			syscall.Wait4(-1, nil, 0, nil)
			reap := make(chan os.Signal, 1)
			signal.Notify(reap, syscall.SIGCHLD)
			<-reap
		}
	}()
	<-end
}
