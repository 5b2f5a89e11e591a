-- Where counters stand: {charges}. Takes nothing; what is in doubt by now is said to be.
tidy()
local standings, _, _, cold, inside = judge(request[1])
if not inside then return answer('outside', now) end
return answer('standings', epoch, now, standings, cold)
