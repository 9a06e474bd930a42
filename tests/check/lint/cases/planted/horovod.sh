horovodrun -np 16 -H server1:4,server2:4 python train.py  #! invalid-device-ordinal
